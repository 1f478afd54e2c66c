//! Texts of other processes, made safe for a terminal.
//!
//! Names of workers, reasons and error messages come from other hosts. A control character in them
//! could move the cursor, change the title or hide a line; a very wide one could push the figures
//! beside it off the screen.

use std::collections::BTreeSet;

use unicode_width::UnicodeWidthChar;

/// The mark at the end of a text that was cut.
const CUT: char = '…';

/// `text` without line breaks, control characters, invisible characters and characters that change
/// the direction of writing, which are escaped, and cut to a number of columns.
pub(crate) fn printable(text: &str, columns_max: usize) -> String {
    let escaped = text.chars().map(|c| match c {
        '\'' | '"' => c.into(),
        c => c.escape_debug().collect::<String>(),
    });
    joined(escaped, columns_max)
}

/// A text that is printable already, cut to a number of columns.
pub(crate) fn cut(printable: &str, columns_max: usize) -> String {
    joined(printable.chars().map(String::from), columns_max)
}

/// Names that are printable, each in at most `columns_max` columns, and cut at the place at which the
/// most of them stay different: at the end, in the middle or at the start.
pub(crate) fn distinct(names: &[&str], columns_max: usize) -> Vec<String> {
    let names: Vec<_> = names.iter().map(|name| printable(name, usize::MAX)).collect();
    let all_different = names.iter().collect::<BTreeSet<_>>().len();
    let mut best: Option<(usize, Vec<String>)> = None;
    let tail = columns_max.saturating_sub(1);
    for tail_columns in [0, tail / 2, tail] {
        let cut: Vec<_> =
            names.iter().map(|name| cut_before(name, columns_max, tail_columns)).collect();
        let different = cut.iter().collect::<BTreeSet<_>>().len();
        if best.as_ref().is_none_or(|(most, _)| different > *most) {
            best = Some((different, cut));
        }
        if different == all_different {
            break;
        }
    }
    best.map(|(_, cut)| cut).unwrap_or_default()
}

/// A printable text without its middle, if it does not fit: so that its last columns are shown.
fn cut_before(text: &str, columns_max: usize, tail_columns: usize) -> String {
    if columns(text) <= columns_max || tail_columns == 0 {
        return cut(text, columns_max);
    }
    let backwards = text.chars().rev().scan(0, |width, c| {
        *width += c.width().unwrap_or(0);
        (*width <= tail_columns).then_some(c)
    });
    let tail: String = backwards.collect::<Vec<_>>().into_iter().rev().collect();
    // The end of what is cut is its mark.
    cut(text, columns_max.saturating_sub(columns(&tail))) + &tail
}

/// The pieces that fit into a number of columns; none of them is divided.
fn joined(pieces: impl Iterator<Item = String>, columns_max: usize) -> String {
    let mut shown = String::new();
    let mut columns = 0;
    // Where to cut if the text does not fit: the mark needs one column.
    let mut cut_at = 0;
    for piece in pieces {
        let width = self::columns(&piece);
        if columns + width > columns_max {
            shown.truncate(cut_at);
            if columns_max > 0 {
                shown.push(CUT);
            }
            return shown;
        }
        columns += width;
        shown.push_str(&piece);
        if columns < columns_max {
            cut_at = shown.len();
        }
    }
    shown
}

/// The number of columns that a text takes in a terminal.
pub(crate) fn columns(text: &str) -> usize {
    text.chars().map(|c| c.width().unwrap_or(0)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_cut_stay_different() {
        let ids = ["prefill-10.0.0.1:8001", "prefill-10.0.0.1:8002"];
        assert_eq!(distinct(&ids, 30), ids);
        assert_eq!(distinct(&ids, 12), ["prefil\u{2026}:8001", "prefil\u{2026}:8002"]);
        assert_eq!(distinct(&["a-long-name", "b-long-name"], 5), ["a-lo\u{2026}", "b-lo\u{2026}"]);
        let far = ["a-long-pool-01-of-many", "a-long-pool-02-of-many"];
        assert_eq!(distinct(&far, 12), ["\u{2026}-01-of-many", "\u{2026}-02-of-many"]);
        assert_eq!(distinct(&["模型模型", "模型模a"], 5), ["模\u{2026}型", "模\u{2026}a"]);
        assert_eq!(distinct(&["same", "same"], 3), ["sa\u{2026}", "sa\u{2026}"]);
    }

    #[test]
    fn characters_that_steer_a_terminal_are_escaped() {
        for (text, shown) in [
            ("decode-0", "decode-0"),
            ("it's \"up\"", "it's \"up\""),
            ("\u{1b}[2Jd0", "\\u{1b}[2Jd0"),
            ("a\nb\tc\r", "a\\nb\\tc\\r"),
            ("\u{9b}31m", "\\u{9b}31m"),
            ("a\u{202e}b\u{200b}", "a\\u{202e}b\\u{200b}"),
            ("e\u{301}", "e\\u{301}"),
            ("é", "é"),
        ] {
            assert_eq!(printable(text, 80), shown);
        }
    }

    #[test]
    fn a_text_takes_no_more_columns_than_it_may() {
        assert_eq!(printable("abcdef", 6), "abcdef");
        assert_eq!(printable("abcdefg", 6), "abcde…");
        assert_eq!(printable("模型模型", 6), "模型…");
        assert_eq!(printable("a\u{1b}b", 6), "a…");
        assert_eq!(printable("abc", 0), "");
        // What is escaped is not escaped again.
        assert_eq!(cut(&printable("a\u{1b}b", 80), 5), "a\\u{…");
        for columns_max in 0..40 {
            for text in ["模型d0\u{1b}[31m模型", "plain text that is long", "\u{202e}\u{202e}"]
            {
                assert!(columns(&printable(text, columns_max)) <= columns_max);
            }
        }
    }
}
