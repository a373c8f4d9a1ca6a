// Evaluate a memory card of memfit: the standard library alone, with a reader of plain JSON.
// rustc -O memory_card.rs && ./memory_card CARD.json checks its vectors.
use std::collections::HashMap;

const STEP: i64 = 256;
const SHARES: i64 = 1024;

pub enum Json {
    Number(i64),
    List(Vec<Json>),
    Map(HashMap<String, Json>),
    Other,
}

impl Json {
    /// Reads what a card has: strings without escapes matter to no evaluator and are skipped.
    pub fn parse(text: &[u8], at: &mut usize) -> Option<Json> {
        skip(text, at);
        match *text.get(*at)? {
            b'{' => {
                let mut map = HashMap::new();
                *at += 1;
                loop {
                    skip(text, at);
                    match *text.get(*at)? {
                        b'}' => { *at += 1; return Some(Json::Map(map)); }
                        b',' => *at += 1,
                        _ => {
                            let key = string(text, at)?;
                            skip(text, at);
                            *at += 1;
                            map.insert(key, Json::parse(text, at)?);
                        }
                    }
                }
            }
            b'[' => {
                let mut list = Vec::new();
                *at += 1;
                loop {
                    skip(text, at);
                    match *text.get(*at)? {
                        b']' => { *at += 1; return Some(Json::List(list)); }
                        b',' => *at += 1,
                        _ => list.push(Json::parse(text, at)?),
                    }
                }
            }
            b'"' => string(text, at).map(|_| Json::Other),
            _ => {
                let start = *at;
                while *at < text.len() && !b",]} \n\r\t".contains(&text[*at]) { *at += 1; }
                let word = std::str::from_utf8(&text[start..*at]).ok()?;
                Some(word.parse().map(Json::Number).unwrap_or(Json::Other))
            }
        }
    }
    fn number(&self) -> i64 { if let Json::Number(value) = self { *value } else { 0 } }
    fn list(&self) -> &[Json] { if let Json::List(list) = self { list } else { &[] } }
    fn get(&self, key: &str) -> &Json {
        if let Json::Map(map) = self { map.get(key).unwrap_or(&Json::Other) } else { &Json::Other }
    }
}

fn skip(text: &[u8], at: &mut usize) {
    while *at < text.len() && text[*at].is_ascii_whitespace() { *at += 1; }
}

fn string(text: &[u8], at: &mut usize) -> Option<String> {
    let start = *at + 1;
    *at = start;
    while *text.get(*at)? != b'"' { *at += if text[*at] == b'\\' { 2 } else { 1 }; }
    *at += 1;
    Some(String::from_utf8_lossy(&text[start..*at - 1]).into_owned())
}

type Knots = Vec<(i64, i64)>;

pub struct Card {
    max_tokens: i64, unit: i64, weights: i64, load: i64, state: i64, view: i64, decode_view: i64,
    steps: Vec<i64>, window_shares: Vec<i64>, caches: Vec<(i64, i64)>, rows: Vec<(i64, i64, Knots, Knots)>,
    decode: Knots, growing: Knots, pub vectors: Vec<Vec<i64>>,
}

fn ceil_div(number: i64, divisor: i64) -> i64 { -(-number).div_euclid(divisor) }
fn up(tokens: i64) -> i64 { ceil_div(tokens, STEP) * STEP }

fn lookup(knots: &Knots, keys: i64) -> i64 {
    if keys <= knots[0].0 { return knots[0].1; }
    let high = knots.partition_point(|knot| knot.0 < keys);
    let ((x0, y0), (x1, y1)) = (knots[high - 1], knots[high]);
    y0 + ceil_div((y1 - y0) * (keys - x0), x1 - x0)
}

impl Card {
    pub fn read(text: &str) -> Option<Card> {
        let json = Json::parse(text.as_bytes(), &mut 0)?;
        let pairs = |each: &Json| -> Knots {
            each.list().iter().map(|p| (p.list()[0].number(), p.list()[1].number())).collect()
        };
        let numbers = |each: &Json| each.list().iter().map(Json::number).collect::<Vec<_>>();
        let value = |key: &str| json.get(key).number();
        Some(Card {
            max_tokens: value("max_tokens"), unit: value("unit"), weights: value("weights_bytes"),
            load: value("load_bytes"), state: value("state_bytes"), view: value("view_bytes"),
            decode_view: value("decode_view_bytes"), steps: numbers(json.get("steps")),
            window_shares: numbers(json.get("window_shares")),
            caches: pairs(json.get("caches")), decode: pairs(json.get("decode")),
            growing: pairs(json.get("growing")),
            rows: json.get("rows").list().iter().map(|row| {
                let row = row.list();
                (row[0].number(), row[1].number(), pairs(&row[2]), pairs(&row[3]))
            }).collect(),
            vectors: json.get("vectors").list().iter().map(numbers).collect(),
        })
    }

    /// The most bytes of a request; None outside of the card.
    pub fn peak(&self, new: i64, cached: i64, step: i64, reply: i64) -> Option<i64> {
        let inside = (new - 1).min(cached).min(reply) >= 0 && cached + new + reply <= self.max_tokens;
        if !inside || !self.steps.contains(&step) { return None; }
        let room = |limit: i64, done: i64| -> i64 {
            if done == 0 { return if limit > 0 { cached.min(limit) } else { cached }; }
            let (rest, last) = (done % step, if done % step == 0 { step } else { done % step });
            if limit > 0 { (cached + done - last).min(limit - 1) + last } else { cached + done / step * step + up(rest) }
        };
        let chunk = |done: i64, tokens: i64| -> i64 {
            let keys = cached + done + tokens;
            let caches: i64 = self.caches.iter().map(|&(limit, per_token)| {
                let after = room(limit, done + tokens);
                per_token * if done > 0 { room(limit, done).max(after) } else { after }
            }).sum();
            let row = self.rows.iter().find(|row| tokens <= row.0).unwrap();
            let view = self.view * tokens.max(if done > 0 { step } else { 0 });
            let knots = if done > 0 { &row.3 } else { &row.2 };
            self.state + caches + view + row.1 * tokens * keys + lookup(knots, keys) * self.unit
        };
        let (done, end) = (new - 1, cached + new + reply);
        let (mut grows, mut beyond, mut decode) = (false, 0, self.state + self.decode_view * step.min(done));
        for &(limit, per_token) in &self.caches {
            let before = room(limit, done);
            let after = before + up((end - before).max(0));
            let after = if limit > 0 { after.min(limit) } else { after };
            grows = grows || after > before;
            beyond += per_token * (before - after).max(0);
            decode += per_token * after;
        }
        decode += ceil_div(beyond * self.window_shares[grows as usize], SHARES);
        decode += lookup(if grows { &self.growing } else { &self.decode }, end) * self.unit;
        let stored: i64 = self.caches.iter().map(|&(limit, per_token)| {
            per_token * if limit > 0 { cached.min(limit - 1 + step) } else { cached }
        }).sum::<i64>() + if cached > 0 { self.state } else { 0 };
        let (full, rest, mut most) = (done / step, done % step, decode);
        if full > 0 { most = most.max(chunk(0, step)).max(chunk((full - 1) * step, step)); }
        if rest > 0 { most = most.max(chunk(full * step, rest)); }
        Some(self.load.max(self.weights + stored + most))
    }
}

fn main() {
    let file = std::env::args().nth(1).expect("name a card");
    let text = std::fs::read_to_string(file).expect("cannot read the card");
    let card = Card::read(&text).expect("no card");
    let wrong = card.vectors.iter().filter(|v| card.peak(v[0], v[1], v[2], v[3]) != Some(v[4])).count();
    println!("{wrong} wrong");
    std::process::exit((wrong > 0) as i32);
}
