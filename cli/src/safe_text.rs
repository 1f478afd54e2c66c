//! Texts of other processes, made safe for a terminal.
//!
//! Names of workers, reasons and error messages come from other hosts. A control character in them
//! could move the cursor, change the title or hide a line; a very wide one could push the figures
//! beside it off the screen.

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
