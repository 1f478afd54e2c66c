//! The types of scalars without quotes: the core schema of YAML 1.2.2, section 10.3.2.

use super::Value;

/// The typed value of a plain scalar.
pub(crate) fn resolve(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => Value::Null,
        "true" | "True" | "TRUE" => Value::Bool(true),
        "false" | "False" | "FALSE" => Value::Bool(false),
        ".nan" | ".NaN" | ".NAN" => Value::Float(f64::NAN),
        _ => integer(text)
            .map(Value::Int)
            .or_else(|| float(text).map(Value::Float))
            .unwrap_or_else(|| Value::Str(text.to_owned())),
    }
}

fn integer(text: &str) -> Option<i128> {
    let (digits, radix, negative) = if let Some(digits) = text.strip_prefix("0x") {
        (digits, 16, false)
    } else if let Some(digits) = text.strip_prefix("0o") {
        (digits, 8, false)
    } else {
        let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
        (unsigned, 10, text.starts_with('-'))
    };
    if digits.is_empty() || !digits.chars().all(|digit| digit.is_digit(radix)) {
        return None;
    }
    let size = i128::from_str_radix(digits, radix).unwrap_or(i128::MAX);
    Some(if negative { -size } else { size })
}

fn float(text: &str) -> Option<f64> {
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    if matches!(unsigned, ".inf" | ".Inf" | ".INF") {
        return Some(if text.starts_with('-') { f64::NEG_INFINITY } else { f64::INFINITY });
    }
    // Rust's parser also accepts words such as `infinity`, which YAML does not.
    let numeric = |c: char| c.is_ascii_digit() || matches!(c, '.' | 'e' | 'E' | '+' | '-');
    let starts = unsigned.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    if starts && unsigned.chars().all(numeric) { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_scalars_follow_the_core_schema() {
        let cases = [
            ("~", Value::Null),
            ("True", Value::Bool(true)),
            ("16", Value::Int(16)),
            ("-0", Value::Int(0)),
            ("007", Value::Int(7)),
            ("0x1F", Value::Int(31)),
            ("0o17", Value::Int(15)),
            ("1e3", Value::Float(1000.0)),
            (".5", Value::Float(0.5)),
            ("-1.", Value::Float(-1.0)),
            ("-.inf", Value::Float(f64::NEG_INFINITY)),
        ];
        for (text, value) in cases {
            assert_eq!(resolve(text), value, "{text}");
        }
        for text in ["yes", "on", "1_000", "0x", "0b1", "infinity", "nan", ".", "-", "1.2.3", "2s"]
        {
            assert_eq!(resolve(text), Value::Str(text.to_owned()), "{text}");
        }
        let beyond = "9".repeat(60);
        assert_eq!(resolve(&beyond), Value::Int(i128::MAX));
    }
}
