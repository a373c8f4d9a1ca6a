// Evaluate a memory card of memfit: Foundation alone.
// swift memory_card.swift CARD.json checks its vectors.
import Foundation

struct MemoryCard: Decodable {
    struct Row: Decodable {
        let tokens, scores: Int
        let first, later: [[Int]]

        init(from decoder: Decoder) throws {
            var values = try decoder.unkeyedContainer()
            tokens = try values.decode(Int.self)
            scores = try values.decode(Int.self)
            first = try values.decode([[Int]].self)
            later = try values.decode([[Int]].self)
        }
    }

    let max_tokens, unit, weights_bytes, load_bytes, state_bytes, view_bytes, decode_view_bytes: Int
    let steps, window_shares: [Int]
    let caches, decode, growing, vectors: [[Int]]
    let rows: [Row]

    static let growth = 256, shares = 1024

    static func ceilDiv(_ number: Int, _ divisor: Int) -> Int {
        number / divisor + (number % divisor > 0 ? 1 : 0)
    }

    static func up(_ tokens: Int) -> Int { ceilDiv(tokens, growth) * growth }

    static func lookup(_ knots: [[Int]], _ keys: Int) -> Int {
        if keys <= knots[0][0] { return knots[0][1] }
        var low = 0, high = knots.count - 1
        while high - low > 1 {
            let middle = (low + high) / 2
            if knots[middle][0] < keys { low = middle } else { high = middle }
        }
        let (left, right) = (knots[low], knots[high])
        return left[1] + ceilDiv((right[1] - left[1]) * (keys - left[0]), right[0] - left[0])
    }

    /// The most bytes of a request; nil outside of the card.
    func peak(new: Int, cached: Int, step: Int, reply: Int) -> Int? {
        guard steps.contains(step), min(new - 1, cached, reply) >= 0,
              cached + new + reply <= max_tokens else { return nil }

        func room(_ limit: Int, _ done: Int) -> Int {
            if done == 0 { return limit > 0 ? min(cached, limit) : cached }
            let rest = done % step, last = rest == 0 ? step : rest
            if limit > 0 { return min(cached + done - last, limit - 1) + last }
            return cached + done / step * step + MemoryCard.up(rest)
        }

        func chunk(_ done: Int, _ tokens: Int) -> Int {
            let keys = cached + done + tokens
            var total = state_bytes
            for cache in caches {
                let after = room(cache[0], done + tokens)
                total += cache[1] * (done > 0 ? max(room(cache[0], done), after) : after)
            }
            let row = rows.first { tokens <= $0.tokens }!
            total += view_bytes * max(tokens, done > 0 ? step : 0) + row.scores * tokens * keys
            return total + MemoryCard.lookup(done > 0 ? row.later : row.first, keys) * unit
        }

        let done = new - 1, end = cached + new + reply
        var grows = false, beyond = 0, most = state_bytes + decode_view_bytes * min(step, done)
        var stored = cached > 0 ? state_bytes : 0
        for cache in caches {
            let before = room(cache[0], done)
            let grown = before + MemoryCard.up(max(0, end - before))
            let after = cache[0] > 0 ? min(grown, cache[0]) : grown
            grows = grows || after > before
            beyond += cache[1] * max(0, before - after)
            most += cache[1] * after
            stored += cache[1] * (cache[0] > 0 ? min(cached, cache[0] - 1 + step) : cached)
        }
        most += MemoryCard.ceilDiv(beyond * window_shares[grows ? 1 : 0], MemoryCard.shares)
        most += MemoryCard.lookup(grows ? growing : decode, end) * unit
        let full = done / step, rest = done % step
        if full > 0 { most = max(most, chunk(0, step), chunk((full - 1) * step, step)) }
        if rest > 0 { most = max(most, chunk(full * step, rest)) }
        return max(load_bytes, weights_bytes + stored + most)
    }
}

let data = try Data(contentsOf: URL(fileURLWithPath: CommandLine.arguments[1]))
let card = try JSONDecoder().decode(MemoryCard.self, from: data)
let wrong = card.vectors.filter {
    card.peak(new: $0[0], cached: $0[1], step: $0[2], reply: $0[3]) != $0[4]
}.count
print("\(wrong) wrong")
exit(wrong > 0 ? 1 : 0)
