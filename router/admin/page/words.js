// Explains the enum values of ppd/decision.py (see docs/ROUTER.md). A test checks completeness.

export const REASONS = {
  first_turn: "no earlier request is a prefix of this one",
  batch: "several prompts in one request have no one home",
  short_prefix: "too little of it is known to be worth a home",
  home_gone: "the worker with the KV is down, draining, left alone, has restarted or flushed its cache, or failed with the turn",
  evicted: "the home worker has dropped the prefix, by its KV events",
  home_unpatched: "the home worker does not offer local prefill",
  resumed: "the worker was lost in mid-stream: the rest comes from another",
  appended: "a passage was found in mid-stream: the stream goes on behind it, where it is",
  no_prefill: "no prefill worker is left: a decode worker prefills the whole prompt, as a way out",
  home_replica: "the conversation lives on a worker that does both",
  refused_by_worker: "the home no longer held the prefix, or had enough appends under way",
  policy_replica: "the policy sends every turn to a replica",
  policy_pd: "the policy sends every turn through a prefill worker",
  policy_full: "the policy takes every later turn locally",
  policy_partial: "the policy takes a share of the later turns locally",
  policy_threshold: "the policy compares the new tokens with a threshold",
  table: "the measured cell says so",
  unknown_cell: "the table does not reach so far, or there is none: the threshold rule says so",
  interpolation: "the cells around, taken together, turned the table's answer",
  stale_prefix: "the prefill worker has missed turns and must catch up; that turned the answer",
  load: "queues and batches are not what they were when it was measured; that turned the answer",
  noise: "remote was better by less than the measurements are sure of",
  observed: "what was seen since turned the table's answer",
  append_budget: "enough appends are under way on the home worker",
  home_full: "no KV is left on the home worker for the turn",
};

export const HOPS = {
  remote: "prefill worker, then KV transfer to the decode worker",
  local: "append-prefill on the decode worker that holds the conversation",
  replica: "one worker prefills and decodes",
};
