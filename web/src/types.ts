// The document that Lowtide puts into the page: src/lowtide/report/page/types.py, version 1.
// Tables are stored by column; texts are positions in `words`.

export type Column = number[];
export type Reals = (number | null)[];

export interface OperatorTable {
  name: Column; kind: Column; module: Column; phase: Column; source: Column; annotation: Column; parent: Column; differentiates: Column;
  inputs: Column[]; outputs: Column[]; seconds: Reals; flop: Reals; counted: Column; moved: Reals;
}
export interface TensorTable {
  name: Column; role: Column; shape: Column; source: Column; module: Column; maker: Column; owner: Column; bytes: Column;
}
export interface StepTables { name: string; operators: OperatorTable; tensors: TensorTable; origin: string; operators_in_all: number }
export interface Figures { peak_bytes: number | null; seconds: number | null }
export interface GradientCheck { bitwise: boolean; loss_equal: boolean; difference: number | null }
export interface Moments {
  operator: Column; live: Column; event: Column; start: Reals; again: Column; tile: Column;
  seconds: number | null; in_all: number; peak: number;
}
export interface MeasuredCurve { at: number[]; live: Column; aligned: boolean }
export interface Blocks {
  tensor: Column; operator: Column; use: Column; bytes: Column; birth: Column; death: Column; offset: Column;
  in_all: number; bytes_left_out: number; events: number;
}
export interface Settled { arena_bytes: number; live_bytes: number; greedy_bytes: number; method: string; optimal: boolean; alignment: number }
export interface Lane { name: string; what: "operator" | "tensor"; row: Column; start: Reals; end: Reals; measured: boolean; in_all: number }
export interface DecisionTable { tensor: Column; decision: Column; reason: Column; price: Reals; instead: Reals; in_all: number }
export interface PartRead { name: string; whole: Column; part: Column; halo: Column; times: number }
export interface LoopView {
  operator: number; axes: Column; lo: Column[]; hi: Column[]; body: Column; body_bytes: Column; body_operators: Column; reads: PartRead[];
}
export interface Proof {
  method: string; overhead: number; bound_overhead: number | null; gap: number; words: string;
  smallest_budget_bytes: number; solve_seconds: number; only: string[]; decisions: string;
}
export interface RunView {
  name: string; step: number; group: number; note: string; budget_bytes: number | null; predicted: Figures | null; measured: Figures | null; eager: Figures | null;
  resident_bytes: number; beside_bytes: number; leaves: Column; moments: Moments; curve: MeasuredCurve | null; blocks: Blocks;
  layout: Settled | null; lanes: Lane[]; decisions: DecisionTable | null; check: GradientCheck | null; loops: LoopView[]; proof: Proof | null;
}
export interface Rival { name: string; peak_bytes: Column; seconds: number[] }
export interface TradeoffCurve {
  budget_bytes: Column; peak_bytes: Column; seconds: number[]; bound_seconds: Reals; plain_bytes: number; plain_seconds: number;
  smallest_bytes: number; floor_bytes: number; cost: string; words: string; rivals: Rival[];
}
export interface DeviceLimits { name: string; flop_per_second: Record<string, number>; bytes_per_second: number }
export interface ShardNodes {
  name: Column; kind: Column; module: Column; phase: Column; shape: Column[]; label: Column[];
  /** By node, label and device: lower bounds, then upper ones. */
  box: (Column | null)[][][]; in_all: number;
}
export interface ShardDecisions { tensor: Column; decision: Column; cut: Column; part: Column; reason: Column; price: Reals; instead: Reals; in_all: number }
export interface MoveTable { tensor: Column; operator: Column; how: Column; phase: Column; axis: Column; dim: Column; sent: Column[]; seconds: Reals; in_all: number }
export interface SplitRow { name: string; seconds: number; peak_bytes: number; plain_bytes: number; wire_bytes: number; fits: boolean }
export interface ShardView {
  name: string; step: number; runs: Column; mesh: Column; ranks: Column; largest: number; budget_bytes: number | null; one: Figures; split: SplitRow;
  messages: number; bound_seconds: number; gap: number; bytes_per_second: number; latency: number; compared: SplitRow[];
  planned_bytes: Column; measured_bytes: Column; sent_bytes: Column; planned_sent_bytes: Column; check: GradientCheck | null; update_difference: number | null;
  decisions: ShardDecisions; moves: MoveTable; nodes: ShardNodes;
}
export interface Report {
  title: string; about: string; words: string[]; steps: StepTables[]; runs: RunView[]; target: string;
  tradeoff: TradeoffCurve | null; limits: DeviceLimits | null; shards: ShardView[]; notes: string[]; made_by: string; lowtide: "report"; version: number;
}
