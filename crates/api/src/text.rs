//! Random ids, and formatting of numbers.

/// A random id of 128 bits, as hex.
pub fn random_id() -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let bits = rand::random::<u128>().to_be_bytes();
    let mut id = String::with_capacity(32);
    for byte in bits {
        id.push(char::from(DIGITS[usize::from(byte >> 4)]));
        id.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    id
}

/// Appends a decimal number. Faster than `write!`, whose overhead would be most of the cost of a
/// header.
pub fn push_number(out: &mut String, number: u64) {
    if number >= 10 {
        push_number(out, number / 10);
    }
    out.push(digit(number % 10));
}

/// The last decimal digit of a number.
pub fn digit(number: u64) -> char {
    char::from(b'0' + (number % 10) as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_everywhere() {
        for number in [0, 7, 10, 99, 100, 12_345, u64::MAX] {
            let mut out = String::new();
            push_number(&mut out, number);
            assert_eq!(out, number.to_string());
        }
    }
}
