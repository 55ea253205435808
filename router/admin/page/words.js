// Explains the routes of ppd/decision.py; a test checks completeness. What a reason means comes
// with the router's state, from the same file.

export const REASONS = {};

export const HOPS = {
  remote: "prefill worker, then KV transfer to the decode worker",
  local: "append-prefill on the decode worker that holds the conversation",
  replica: "one worker prefills and decodes",
};
