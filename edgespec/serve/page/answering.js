// An answer as it comes: what each event brings to its message, and how fast it was where nobody says so.

/** Begin an answer, or go on with one that ended early. */
export function begin(message) {
  message.isOpen = true;
  message.tokens ??= [];
  message.earlier = message.timings; // of the part that is there
  message.counted = { tokens: 0, passes: 0, first: 0, last: 0, firstTokens: 0 };
  delete message.timings;
  delete message.ending;
}

/** Take an event of the stream. */
export function take(message, event) {
  if (event.reading) message.progress = event.reading;
  for (const { delta, finish_reason } of event.choices ?? []) {
    message.content += delta.content ?? "";
    message.reasoning = (message.reasoning ?? "") + (delta.reasoning_content ?? "");
    if (finish_reason === "length") message.ending = "cut at the most tokens";
  }
  if (event.timings) message.timings = event.timings;
  if (!event.draft) return;
  const { tokens, nodes_by_depth: sizes, num_accepted: accepted } = event.draft;
  count(message.counted, tokens.length);
  if (sizes.length) message.tree = { sizes, accepted };
  for (const [text, foreseen] of tokens) {
    const last = message.tokens.at(-1);
    if (last && last[1] === foreseen) last[0] += text;
    else message.tokens.push([text, foreseen]);
  }
}

function count(counted, tokens) {
  counted.last = performance.now();
  if (!counted.tokens) Object.assign(counted, { first: counted.last, firstTokens: tokens });
  counted.tokens += tokens;
  counted.passes += 1;
}

/** End an answer: `ending` says how, where it ended early. */
export function end(message, ending) {
  if (ending) message.ending = ending;
  const { counted, earlier } = message;
  if (!message.timings && counted.tokens) message.timings = measured(counted);
  if (earlier) message.timings = message.timings ? together(earlier, message.timings) : earlier;
  for (const name of ["isOpen", "progress", "counted", "earlier"]) delete message[name];
}

/** Return the speed of what came before the server said it: an answer that is stopped has no last event. */
function measured({ tokens, passes, first, last, firstTokens }) {
  const timings = { predicted_n: tokens, predicted_ms: last - first, tokens_per_pass: tokens / passes, isMeasuredHere: true };
  if (tokens > firstTokens) timings.predicted_per_second = (1000 * (tokens - firstTokens)) / (last - first);
  return timings;
}

function together(one, other) {
  const [tokens, ms] = [one.predicted_n + other.predicted_n, one.predicted_ms + other.predicted_ms];
  const passes = [one, other].map((each) => (each.tokens_per_pass ? each.predicted_n / each.tokens_per_pass : 0));
  return {
    predicted_n: tokens,
    predicted_ms: ms,
    tokens_per_pass: passes[0] + passes[1] > 0 ? tokens / (passes[0] + passes[1]) : null,
    predicted_per_second: ms > 0 ? (1000 * tokens) / ms : null,
    isMeasuredHere: one.isMeasuredHere || other.isMeasuredHere,
  };
}
