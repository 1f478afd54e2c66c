//! Random ids, and formatting of numbers and addresses.

use std::fmt::Write;
use std::net::IpAddr;
use std::time::Duration;

/// A random id of 128 bits, as hex.
pub fn random_id() -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut id = [0; 32];
    for (pair, byte) in id.chunks_exact_mut(2).zip(rand::random::<[u8; 16]>()) {
        pair.copy_from_slice(&[byte >> 4, byte & 15].map(|value| DIGITS[usize::from(value)]));
    }
    // Digits are ASCII.
    std::str::from_utf8(&id).unwrap_or_default().to_owned()
}

/// Appends an address. One of IPv4 takes a fifth of the instructions that `write!` needs for it.
pub fn push_address(out: &mut String, address: IpAddr) {
    match address {
        IpAddr::V4(address) => {
            for (at, octet) in address.octets().into_iter().enumerate() {
                if at > 0 {
                    out.push('.');
                }
                push_number(out, octet.into());
            }
        }
        IpAddr::V6(address) => {
            // Writing to a string cannot fail.
            let _infallible = write!(out, "{address}");
        }
    }
}

/// Appends a decimal number. Faster than `write!`, whose overhead would be most of the cost of a
/// header.
pub fn push_number(out: &mut String, number: u64) {
    out.push_str(itoa::Buffer::new().format(number));
}

/// Appends a duration in milliseconds, with three decimals.
pub fn push_ms(out: &mut String, duration: Duration) {
    let us = (duration.as_nanos() as u64 + 500) / 1000;
    push_number(out, us / 1000);
    // 1000 is added to keep leading zeros; its digit 1 is cut off.
    let mut decimals = itoa::Buffer::new();
    out.extend([".", &decimals.format(1000 + us % 1000)[1..]]);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn random_ids_are_32_hexadecimal_digits() {
        let id = random_id();
        let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        assert!(id.len() == 32 && id.bytes().all(is_digit), "{id}");
    }

    #[test]
    fn addresses_are_written_as_everywhere() {
        for text in ["0.0.0.0", "127.0.0.1", "10.20.255.100", "::1", "2001:db8::8:800:200c:417a"] {
            let mut out = String::new();
            push_address(&mut out, text.parse().unwrap());
            assert_eq!(out, text);
        }
    }

    #[test]
    fn durations_are_rounded_to_three_decimals_of_a_millisecond() {
        for (ns, expected) in [
            (0, "0.000"),
            (499, "0.000"),
            (500, "0.001"),
            (1_010_000, "1.010"),
            (999_999_500, "1000.000"),
            (12_345_678_901, "12345.679"),
        ] {
            let mut out = String::new();
            push_ms(&mut out, Duration::from_nanos(ns));
            assert_eq!(out, expected);
        }
    }

    #[test]
    fn numbers_are_written_as_everywhere() {
        for number in [0, 7, 10, 99, 100, 12_345, u64::MAX] {
            let mut out = String::new();
            push_number(&mut out, number);
            assert_eq!(out, number.to_string());
        }
    }
}
