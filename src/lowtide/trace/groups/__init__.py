"""Groups: operators of a traced step that run together as compiled kernels.

Takes the joint graph of AOTAutograd; changes it so that runs of pointwise operators, reductions,
normalisations and views are one call each, a ``Group``. ``fusible`` says which operators may be part of one,
``decompose`` takes apart what is better fused in pieces, ``form`` chooses the groups, ``save`` what backward
reads of forward and what it computes again inside its groups, ``rewrite`` puts them into the graph.
``slices`` makes a convolution in slices of the batch one call, which is not compiled.
Before a step is traced, ``channels_last`` changes the layout of its convolutions and ``padded`` the sizes of
its products; ``functions`` says what may be changed.

From outside: ``channels_last``, ``decompose``, ``functions``, ``fusible``, ``padded``, ``rewrite``,
``slices``.
"""
