"""Random training steps, each tensor written once: what a capture gives."""

from hypothesis import strategies as st

from lowtide.graph import Graph, Op, Phase, Role, Tensor, validate


@st.composite
def training_steps(draw):
    tensors = [
        Tensor(f"leaf{k}", draw(st.integers(1, 50)), draw(st.sampled_from([Role.PARAMETER, Role.INPUT])))
        for k in range(draw(st.integers(1, 3)))
    ]
    leaves = len(tensors)
    ops = []
    readable = list(range(leaves))
    forward = draw(st.integers(1, 6))
    for k in range(forward + draw(st.integers(1, 6))):
        phase = Phase.FORWARD if k < forward else Phase.BACKWARD
        inputs = draw(st.lists(st.sampled_from(readable), min_size=1, max_size=3))
        view = draw(st.integers(0, 4)) == 0
        outputs = []
        for _ in range(1 if view else draw(st.integers(1, 2))):
            alias = inputs[0] if view else None
            gradient_of = None
            if phase is Phase.BACKWARD and not view and draw(st.booleans()):
                gradient_of = draw(st.integers(0, leaves - 1))
            role = Role.ACTIVATION if gradient_of is None else Role.GRADIENT
            outputs.append(len(tensors))
            tensors.append(
                Tensor(
                    f"t{len(tensors)}", draw(st.integers(0, 50)), role, alias=alias, gradient_of=gradient_of
                )
            )
        readable += outputs
        ops.append(Op(f"op{k}", "k", phase, tuple(inputs), tuple(outputs)))
    last = [op.outputs[0] for op in ops if op.phase is Phase.FORWARD][-1]
    return validate(Graph(tuple(tensors), tuple(ops), returned=(last,)))
