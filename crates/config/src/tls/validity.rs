//! Reads when a certificate's validity ends, which the TLS library checks but does not report.

/// DER tags (X.690, section 8; X.680, section 8.4).
const SEQUENCE: u8 = 0x30;
const INTEGER: u8 = 0x02;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
/// The tag of `version` in a certificate, which older versions lack.
const VERSION: u8 = 0xa0;

/// The `notAfter` of an X.509 certificate in DER (RFC 5280, section 4.1), in seconds since 1970;
/// `None` if the bytes are not such a certificate.
pub fn not_after_unix_s(certificate: &[u8]) -> Option<i64> {
    let (certificate, _) = element(certificate, SEQUENCE)?;
    let (mut fields, _) = element(certificate, SEQUENCE)?;
    if let Some((_, rest)) = element(fields, VERSION) {
        fields = rest;
    }
    // The serial number, the algorithm of the signature, and the issuer.
    for tag in [INTEGER, SEQUENCE, SEQUENCE] {
        (_, fields) = element(fields, tag)?;
    }
    let (validity, _) = element(fields, SEQUENCE)?;
    let is_short = |times: &[u8]| times.first() == Some(&UTC_TIME);
    let tag = |times: &[u8]| if is_short(times) { UTC_TIME } else { GENERALIZED_TIME };
    let (_, not_after) = element(validity, tag(validity))?;
    let (text, _) = element(not_after, tag(not_after))?;
    unix_s(text, is_short(not_after))
}

/// The content of the first element, which must have this tag, and the bytes after it.
fn element(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&[found, length], rest) = bytes.split_first_chunk()?;
    if found != tag {
        return None;
    }
    // Up to 127, the byte is the length. Otherwise it is the number of bytes of the length.
    let (length, rest) = match length {
        0..=127 => (usize::from(length), rest),
        129..=132 => {
            let (digits, rest) = rest.split_at_checked(usize::from(length - 128))?;
            (digits.iter().fold(0, |sum, digit| sum << 8 | usize::from(*digit)), rest)
        }
        _ => return None,
    };
    rest.split_at_checked(length)
}

/// `YYMMDDHHMMSSZ` or `YYYYMMDDHHMMSSZ` (RFC 5280, section 4.1.2.5) in seconds since 1970.
fn unix_s(text: &[u8], is_short: bool) -> Option<i64> {
    let digits = text.strip_suffix(b"Z")?;
    if !digits.iter().all(u8::is_ascii_digit) || !digits.len().is_multiple_of(2) {
        return None;
    }
    let pair = |two: &[u8]| i64::from(two[0] - b'0') * 10 + i64::from(two[1] - b'0');
    let pairs: Vec<i64> = digits.chunks_exact(2).map(pair).collect();
    let (year, rest) = match (is_short, &pairs[..]) {
        // Years of two digits are from 1950 to 2049.
        (true, [year, rest @ ..]) => (year + if *year < 50 { 2000 } else { 1900 }, rest),
        (false, [century, year, rest @ ..]) => (century * 100 + year, rest),
        _ => return None,
    };
    let &[month @ 1..=12, day @ 1..=31, hour @ 0..=23, minute @ 0..=59, second @ 0..=60] = rest
    else {
        return None;
    };
    Some(((days(year, month, day) * 24 + hour) * 60 + minute) * 60 + second)
}

/// The number of days from 1970-01-01 to a day of the Gregorian calendar.
fn days(year: i64, month: i64, day: i64) -> i64 {
    // With years that begin in March, the day that leap years add is the last of its year.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let day_of_year = (153 * month + 2) / 5 + day - 1;
    let leap_days = year / 4 - year / 100 + year / 400;
    year * 365 + leap_days + day_of_year - 719_468
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject;

    use super::*;

    #[test]
    fn the_end_of_a_certificate_is_read_and_damaged_ones_are_not() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/config/tls");
        let router = CertificateDer::from_pem_file(folder.join("router.pem")).unwrap();
        // 2120-01-01.
        assert_eq!(not_after_unix_s(&router), Some(4_733_510_400));
        for bytes in 0..200 {
            assert_eq!(not_after_unix_s(&router[..bytes]), None, "{bytes}");
        }
        for at in 0..router.len() {
            for byte in [0, 0x30, 0x7f, 0x80, 0x84, 0xff] {
                let mut damaged = router.to_vec();
                damaged[at] = byte;
                let _no_panic = not_after_unix_s(&damaged);
            }
        }
    }

    #[test]
    fn times_have_two_or_four_digits_of_the_year() {
        for (text, is_short, expected) in [
            ("700101000000Z", true, Some(0)),
            ("500101000000Z", true, Some(-631_152_000)),
            ("491231235959Z", true, Some(2_524_607_999)),
            ("20000229120000Z", false, Some(951_825_600)),
            ("20240301000000Z", false, Some(1_709_251_200)),
            ("20500101000000Z", false, Some(2_524_608_000)),
            ("99991231235959Z", false, Some(253_402_300_799)),
            ("20501301000000Z", false, None),
            ("20500101000000", false, None),
            ("2050010100000Z", false, None),
            ("20500101000000+0100", false, None),
            ("", true, None),
            ("Z", false, None),
        ] {
            assert_eq!(unix_s(text.as_bytes(), is_short), expected, "{text}");
        }
    }
}
