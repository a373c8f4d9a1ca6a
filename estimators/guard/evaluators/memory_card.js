// Evaluate a memory card of memfit: no dependencies. node memory_card.js CARD.json checks its vectors.
// All numbers stay below 2^53: tables are in units of card.unit bytes.
'use strict';
const STEP = 256, SHARES = 1024;
const ceilDiv = (number, divisor) => -Math.floor(-number / divisor);
const up = (tokens) => ceilDiv(tokens, STEP) * STEP;

function lookup(knots, keys) {
  if (keys <= knots[0][0]) return knots[0][1];
  let low = 0, high = knots.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (knots[middle][0] < keys) low = middle; else high = middle;
  }
  const [x0, y0] = knots[low], [x1, y1] = knots[high];
  return y0 + ceilDiv((y1 - y0) * (keys - x0), x1 - x0);
}

function peak(card, fresh, cached, step, reply) {
  if (fresh < 1 || cached < 0 || reply < 0 || cached + fresh + reply > card.max_tokens) {
    throw new RangeError(`the card ends at ${card.max_tokens} tokens`);
  }
  if (!card.steps.includes(step)) throw new RangeError(`the card has steps ${card.steps}`);
  const room = (limit, done) => {
    if (!done) return limit ? Math.min(cached, limit) : cached;
    const full = Math.floor(done / step), rest = done % step, last = rest || step;
    if (limit) return Math.min(cached + done - last, limit - 1) + last;
    return cached + full * step + up(rest);
  };
  const chunk = (done, tokens) => {
    let total = card.state_bytes;
    const keys = cached + done + tokens;
    for (const [limit, perToken] of card.caches) {
      const after = room(limit, done + tokens);
      total += perToken * (done ? Math.max(room(limit, done), after) : after);
    }
    const [, scores, first, later] = card.rows.find((row) => tokens <= row[0]);
    total += card.view_bytes * Math.max(tokens, done ? step : 0) + scores * tokens * keys;
    return total + lookup(done ? later : first, keys) * card.unit;
  };
  const decode = () => {
    const done = fresh - 1, end = cached + fresh + reply;
    let total = card.state_bytes, grows = false, beyond = 0;
    for (const [limit, perToken] of card.caches) {
      const before = room(limit, done);
      let after = before + up(Math.max(0, end - before));
      if (limit) after = Math.min(after, limit);
      grows = grows || after > before;
      beyond += perToken * Math.max(0, before - after);
      total += perToken * after;
    }
    total += ceilDiv(beyond * card.window_shares[grows ? 1 : 0], SHARES);
    total += card.decode_view_bytes * Math.min(step, done);
    return total + lookup(grows ? card.growing : card.decode, end) * card.unit;
  };
  let stored = cached ? card.state_bytes : 0;
  for (const [limit, perToken] of card.caches) {
    stored += perToken * (limit ? Math.min(cached, limit - 1 + step) : cached);
  }
  const full = Math.floor((fresh - 1) / step), rest = (fresh - 1) % step;
  let most = decode();
  if (full) most = Math.max(most, chunk(0, step), chunk((full - 1) * step, step));
  if (rest) most = Math.max(most, chunk(full * step, rest));
  return Math.max(card.load_bytes, card.weights_bytes + stored + most);
}

module.exports = { peak };
if (require.main === module) {
  const card = JSON.parse(require('fs').readFileSync(process.argv[2], 'utf8'));
  const wrong = card.vectors.filter(([n, m, s, g, want]) => peak(card, n, m, s, g) !== want).length;
  console.log(`${wrong} wrong`);
  process.exit(wrong ? 1 : 0);
}
