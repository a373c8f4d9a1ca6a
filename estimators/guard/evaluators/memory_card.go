// Evaluate a memory card of memfit: the standard library alone.
// go run memory_card.go CARD.json checks its vectors; rename the package to use it.
package main

import (
	"encoding/json"
	"fmt"
	"os"
)

const growth, shares = 256, 1024

type Knot [2]int64

type Row struct {
	Tokens, Scores int64
	First, Later   []Knot
}

func (row *Row) UnmarshalJSON(data []byte) error {
	return json.Unmarshal(data, &[]any{&row.Tokens, &row.Scores, &row.First, &row.Later})
}

type Card struct {
	MaxTokens       int64      `json:"max_tokens"`
	Steps           []int64    `json:"steps"`
	Unit            int64      `json:"unit"`
	WeightsBytes    int64      `json:"weights_bytes"`
	LoadBytes       int64      `json:"load_bytes"`
	StateBytes      int64      `json:"state_bytes"`
	Caches          [][2]int64 `json:"caches"`
	ViewBytes       int64      `json:"view_bytes"`
	DecodeViewBytes int64      `json:"decode_view_bytes"`
	WindowShares    [2]int64   `json:"window_shares"`
	Rows            []Row      `json:"rows"`
	Decode          []Knot     `json:"decode"`
	Growing         []Knot     `json:"growing"`
	Vectors         [][5]int64 `json:"vectors"`
}

func ceilDiv(number, divisor int64) int64 {
	quotient := number / divisor
	if number%divisor > 0 {
		quotient++
	}
	return quotient
}

func up(tokens int64) int64 { return ceilDiv(tokens, growth) * growth }

func lookup(knots []Knot, keys int64) int64 {
	if keys <= knots[0][0] {
		return knots[0][1]
	}
	low, high := 0, len(knots)-1
	for high-low > 1 {
		middle := (low + high) / 2
		if knots[middle][0] < keys {
			low = middle
		} else {
			high = middle
		}
	}
	left, right := knots[low], knots[high]
	return left[1] + ceilDiv((right[1]-left[1])*(keys-left[0]), right[0]-left[0])
}

type prompt struct {
	card                     *Card
	fresh, cached, step, reply int64
}

func (p prompt) room(limit, done int64) int64 {
	if done == 0 {
		if limit > 0 {
			return min(p.cached, limit)
		}
		return p.cached
	}
	rest := done % p.step
	last := rest
	if rest == 0 {
		last = p.step
	}
	if limit > 0 {
		return min(p.cached+done-last, limit-1) + last
	}
	return p.cached + done/p.step*p.step + up(rest)
}

func (p prompt) chunk(done, tokens int64) int64 {
	total, keys, view := p.card.StateBytes, p.cached+done+tokens, tokens
	for _, cache := range p.card.Caches {
		after := p.room(cache[0], done+tokens)
		if done > 0 {
			after = max(p.room(cache[0], done), after)
		}
		total += cache[1] * after
	}
	index := 0
	for p.card.Rows[index].Tokens < tokens {
		index++
	}
	row := p.card.Rows[index]
	knots := row.First
	if done > 0 {
		knots, view = row.Later, max(tokens, p.step)
	}
	return total + p.card.ViewBytes*view + row.Scores*tokens*keys + lookup(knots, keys)*p.card.Unit
}

func (p prompt) decode() int64 {
	total, done, knots := p.card.StateBytes, p.fresh-1, p.card.Decode
	end, beyond, share := p.cached+p.fresh+p.reply, int64(0), p.card.WindowShares[0]
	for _, cache := range p.card.Caches {
		before := p.room(cache[0], done)
		after := before + up(max(0, end-before))
		if cache[0] > 0 {
			after = min(after, cache[0])
		}
		if after > before {
			knots, share = p.card.Growing, p.card.WindowShares[1]
		}
		beyond += cache[1] * max(0, before-after)
		total += cache[1] * after
	}
	total += ceilDiv(beyond*share, shares)
	return total + p.card.DecodeViewBytes*min(p.step, done) + lookup(knots, end)*p.card.Unit
}

// Peak returns the most bytes of a request, and an error outside of the card.
func (card *Card) Peak(fresh, cached, step, reply int64) (int64, error) {
	known := false
	for _, each := range card.Steps {
		known = known || each == step
	}
	if !known || min(fresh-1, cached, reply) < 0 || cached+fresh+reply > card.MaxTokens {
		return 0, fmt.Errorf("outside of the card: %d tokens, steps %v", card.MaxTokens, card.Steps)
	}
	p := prompt{card, fresh, cached, step, reply}
	stored := int64(0)
	if cached > 0 {
		stored = card.StateBytes
	}
	for _, cache := range card.Caches {
		tokens := cached
		if cache[0] > 0 {
			tokens = min(cached, cache[0]-1+step)
		}
		stored += cache[1] * tokens
	}
	full, rest, most := (fresh-1)/step, (fresh-1)%step, p.decode()
	if full > 0 {
		most = max(most, p.chunk(0, step), p.chunk((full-1)*step, step))
	}
	if rest > 0 {
		most = max(most, p.chunk(full*step, rest))
	}
	return max(card.LoadBytes, card.WeightsBytes+stored+most), nil
}

func main() {
	data, err := os.ReadFile(os.Args[1])
	card := Card{}
	if err == nil {
		err = json.Unmarshal(data, &card)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	wrong := 0
	for _, v := range card.Vectors {
		if answer, err := card.Peak(v[0], v[1], v[2], v[3]); err != nil || answer != v[4] {
			wrong++
		}
	}
	fmt.Println(wrong, "wrong")
	if wrong > 0 {
		os.Exit(1)
	}
}
