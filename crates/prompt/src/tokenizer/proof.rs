//! Difficult texts, on which similar tokenizers differ.

use splitrail_kv::SplitMix64;

/// Pieces of text that are difficult, each for a different reason.
const PIECES: [&str; 64] = [
    // White space of all kinds, in runs and at the edges.
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    " \n ",
    "\n    ",
    "\t\t\n",
    "\u{a0}",
    "\u{2003}",
    "\u{3000}",
    "\u{85}",
    "\u{2028}",
    "\u{200b}",
    "\u{feff}",
    // Words and their ends.
    "the",
    " The",
    "don't",
    "I'LL",
    "we\u{2019}ve",
    "x's'd",
    "naïve",
    "İstanbul",
    "straße",
    "ǅ",
    "ﬁnal",
    "K\u{212a}",
    "e\u{301}",
    "\u{301}a",
    "a\u{308}\u{323}",
    "\u{1100}\u{1161}\u{11a8}",
    "각",
    "Å\u{212b}",
    "Ω\u{2126}",
    // Numbers.
    "1",
    "12",
    "123",
    "1234",
    "1234567",
    "3.14",
    "½",
    "٣٤٥",
    "१२३",
    "Ⅷ",
    "𝟘𝟙𝟚",
    "²³",
    // Scripts without spaces.
    "東京都に行く",
    "你好，世界！",
    "한국어",
    "สวัสดี",
    "नमस्ते",
    "العربية",
    "\u{202e}abc\u{202c}",
    // Emoji and their joiners.
    "👩\u{200d}👩\u{200d}👧",
    "🇩🇪🇫🇷",
    "👍🏽",
    "❤\u{fe0f}",
    // Signs, code, and letters that are new in Unicode.
    "!!!...---",
    "}\n}\n",
    "fn f(x: &mut [u8]) -> ()",
    "\u{1c89}\u{a7cb}\u{10d40}",
    "\u{fffd}\u{0}\u{7f}",
];

/// Texts that each contain some of the pieces, with added tokens at various places; and words of
/// the vocabulary without spaces between them, so that they must be merged differently.
pub(super) fn texts(added: &[&str], words: &[String]) -> Vec<String> {
    let mut texts: Vec<String> = PIECES.iter().map(ToString::to_string).collect();
    texts.push(String::new());
    texts.push("ab".repeat(700) + &" ".repeat(300) + &"\n".repeat(90) + &"=".repeat(200));
    texts.push("é".repeat(400) + &"本".repeat(300) + &"9".repeat(150) + &"🙂".repeat(60));
    for pair in PIECES.windows(2) {
        texts.push(pair.concat());
        texts.push(format!("{}{}{}", pair[1], pair[0], pair[1]));
    }
    // Some models have a thousand added tokens, most of which are similar.
    let step = (added.len() / 64).max(1);
    for (at, token) in added.iter().enumerate().step_by(step) {
        let piece = PIECES[at * 7 % PIECES.len()];
        let cut: String = token.chars().skip(1).collect();
        texts.push(format!("{piece}{token}{piece}"));
        texts.push(format!("a {token} \n{token}{token}b {cut}{token}"));
        texts.push(format!(" {}{piece} {token}", token.to_uppercase()));
    }
    let mut random = PseudoRandom(SplitMix64::new(0x5eed));
    for _ in 0..160 {
        let pieces = (0..random.below(40)).map(|_| match random.below(12) {
            0 if !added.is_empty() => added[random.below(added.len())].to_owned(),
            1 => random.character().to_string(),
            _ => PIECES[random.below(PIECES.len())].to_owned(),
        });
        texts.push(pieces.collect());
    }
    for few in words.chunks(4) {
        texts.push(few.concat());
        let cut = |word: &String| word.chars().skip(1).collect::<String>();
        texts.push(few.iter().rev().map(cut).collect());
    }
    texts
}

/// Pseudo-random numbers that are the same in every run.
struct PseudoRandom(SplitMix64);

impl PseudoRandom {
    fn below(&mut self, count: usize) -> usize {
        (self.0.next_u64() % count.max(1) as u64) as usize
    }

    /// A character from the Unicode planes that contain letters.
    fn character(&mut self) -> char {
        char::from_u32(self.below(0x3_2000) as u32).unwrap_or('\u{fffd}')
    }
}
