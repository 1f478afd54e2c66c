//! Prints the operands of a concatenation one by one, where a template concatenates them only to
//! print them.
//!
//! `{{ '<|im_start|>' + role + '\n' + content + '<|im_end|>' }}` copies the content for each `+`,
//! that is twice. If one operand is a string literal of the template, all others must be strings as
//! well, or concatenation fails: so the output is the same without concatenation. The template's
//! tokens show where this is the case; all other expressions stay unchanged.

use std::ops::Range;

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// The filter that passes strings and fails on anything else. Unlike a function's name, a filter's
/// name cannot be redefined by a variable.
pub(super) const TEXT: &str = "__text";

/// Words that are operators, and do not occur in a plain sum.
const OPERATORS: [&str; 7] = ["and", "else", "if", "in", "is", "not", "or"];

/// Fails for values that cannot be concatenated with a string.
pub(super) fn text(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => Ok(value),
        _ => Err(Error::new(ErrorKind::InvalidOperation, "joining a text and something else")),
    }
}

/// The template with concatenations printed operand by operand. An invalid template is returned
/// unchanged; compiling it reports the error.
pub(super) fn split_concatenations(source: &str, syntax: SyntaxConfig) -> String {
    rewritten(source, syntax).unwrap_or_else(|| source.to_owned())
}

fn rewritten(source: &str, syntax: SyntaxConfig) -> Option<String> {
    let mut out = String::with_capacity(source.len() * 5 / 4);
    let mut copied = 0;
    let mut sum: Option<Sum> = None;
    for token in tokenize(source, false, syntax) {
        let (token, span) = token.ok()?;
        let place = span.start_offset as usize..span.end_offset as usize;
        match (&token, &mut sum) {
            (Token::VariableStart, _) => sum = Some(Sum::default()),
            (Token::VariableEnd, _) => {
                let Some(sum) = sum.take().filter(Sum::is_of_texts) else { continue };
                for part in sum.parts {
                    out.push_str(source.get(copied..part.from)?);
                    copied = part.to;
                    let text = source.get(part.from..part.to)?;
                    match part.kind {
                        Kind::Literal => out.push_str(text),
                        Kind::Other => out.extend(["(", text, ")|", TEXT]),
                        Kind::Plus if text == "+" => out.push_str("}}{{"),
                        // The token is not at the reported position.
                        Kind::Plus => return None,
                    }
                }
            }
            (token, Some(sum)) => sum.take(token, place),
            (_, None) => {}
        }
    }
    out.push_str(source.get(copied..)?);
    Some(out)
}

/// A printed expression, as far as it was read.
#[derive(Default)]
struct Sum {
    parts: Vec<Part>,
    /// Number of open brackets.
    depth: usize,
    /// Whether the expression contains something other than a plain sum.
    is_other: bool,
}

/// A part of the source: byte offsets and kind.
struct Part {
    from: usize,
    to: usize,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A string literal.
    Literal,
    /// Any other operand.
    Other,
    /// The operator `+`.
    Plus,
}

impl Sum {
    fn take(&mut self, token: &Token<'_>, place: Range<usize>) {
        let Range { start: from, end: to } = place;
        let kind = match token {
            Token::BracketOpen | Token::ParenOpen | Token::BraceOpen => {
                self.depth += 1;
                Kind::Other
            }
            Token::BracketClose | Token::ParenClose | Token::BraceClose => {
                self.depth = self.depth.saturating_sub(1);
                Kind::Other
            }
            _ if self.depth > 0 => Kind::Other,
            Token::Plus => Kind::Plus,
            Token::Str(_) | Token::String(_) => Kind::Literal,
            // These operators bind more strongly than `+`.
            Token::Ident(_) | Token::Dot | Token::Pipe | Token::Tilde => Kind::Other,
            _ => {
                self.is_other = true;
                Kind::Other
            }
        };
        self.is_other |=
            self.depth == 0 && matches!(token, Token::Ident(name) if OPERATORS.contains(name));
        match self.parts.last_mut() {
            // Consecutive tokens that are not `+` form one operand.
            Some(last) if last.kind != Kind::Plus && kind != Kind::Plus => {
                (last.to, last.kind) = (to, Kind::Other);
            }
            _ => self.parts.push(Part { from, to, kind }),
        }
    }

    /// Whether this is a sum of several operands, at least one of which is a string literal.
    fn is_of_texts(&self) -> bool {
        let kinds = || self.parts.iter().map(|part| part.kind);
        let alternates =
            kinds().enumerate().all(|(at, kind)| (kind == Kind::Plus) == (at % 2 == 1));
        let is_sum = self.parts.len() > 2 && self.parts.len() % 2 == 1 && alternates;
        !self.is_other && self.depth == 0 && is_sum && kinds().any(|kind| kind == Kind::Literal)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use minijinja::{Environment, context};
    use proptest::prelude::*;

    use super::*;

    fn syntax() -> SyntaxConfig {
        SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap()
    }

    fn apart(source: &str) -> String {
        split_concatenations(source, syntax())
    }

    #[test]
    fn concatenations_with_a_string_are_printed_operand_by_operand() {
        for (source, wanted) in [
            ("{{ 'a' + b }}", "{{ 'a' }}{{ (b)|__text }}"),
            (
                "x{{- '<' + m['role'] + \"\\n\" + m.content|trim + f(1, g + 'h') -}}y",
                "x{{- '<' }}{{ (m['role'])|__text }}{{ \"\\n\" }}{{ (m.content|trim)|__text }}{{ \
                 (f(1, g + 'h'))|__text -}}y",
            ),
            ("{{ a ~ b + 'c' }}", "{{ (a ~ b)|__text }}{{ 'c' }}"),
            (
                "{% if x %}{{ (a) + 'b' }}{% endif %}",
                "{% if x %}{{ ((a))|__text }}{{ 'b' }}{% endif %}",
            ),
        ] {
            assert_eq!(apart(source), wanted);
        }
    }

    #[test]
    fn other_expressions_are_unchanged() {
        for source in [
            "",
            "{{ a + b }}",
            "{{ loop.index + 1 }}",
            "{{ 'a' }}{{ b }}",
            "{{ ('a' + b) }}",
            "{{ 'a' + b if c else d }}",
            "{{ 'a' + b == c }}",
            "{{ 'a' in b + c }}",
            "{{ not 'a' + b }}",
            "{{ 'a' + b - c }}",
            "{{ 'a' + 2 * b }}",
            "{{ a ~ 1|string + 'b' ~ c + 'd' }}",
            "{{ a ~ 1|string + 'b' }}",
            "{{ 'a' + }}",
            "{{ 'a' + b",
            "{% set x = 'a' + b %}{% raw %}{{ 'a' + b }}{% endraw %}{# {{ 'a' + b }} #}",
        ] {
            assert_eq!(apart(source), source);
        }
    }

    fn rendered(source: &str) -> Option<String> {
        let mut env = Environment::new();
        env.set_syntax(syntax());
        env.add_filter(TEXT, text);
        let given =
            context! { s => "x", t => "", n => 3, l => [1], u => (), m => context! { s => "y" } };
        env.render_str(source, given).ok()
    }

    proptest! {
        #[test]
        fn the_rendered_text_is_the_same(
            parts in prop::collection::vec((
                "'a'|\"b c\"|''|s|t|n|l|u|m|m\\.s|m\\['s'\\]|s\\|upper|\\(s \\+ t\\)|\\(1 \\+ n\\)|none|s ~ n|1|missing|'a'\\*2",
                " \\+ |\\+|  \\+\n| ~ | - | if t else | == ",
            ), 1..5),
            (before, behind) in ("|x |\n", "|\n y"),
            (open, close) in ("\\{\\{|\\{\\{-|\\{\\{ ", "\\}\\}|-\\}\\}| \\}\\}"),
        ) {
            let mut source = format!("{before}{open}");
            for (at, (part, joint)) in parts.iter().enumerate() {
                source.push_str(if at == 0 { "" } else { joint });
                source.push_str(part);
            }
            source.push_str(&close);
            source.push_str(&behind);
            prop_assert_eq!(rendered(&apart(&source)), rendered(&source), "{}", source);
        }
    }
}
