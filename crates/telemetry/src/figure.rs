//! Rounds figures for people to read.

/// A figure with three digits after the point, or none from 1000 on; `None` if it is not finite.
pub fn rounded(figure: f64) -> Option<f64> {
    let scale = if figure.abs() < 1000.0 { 1000.0 } else { 1.0 };
    figure.is_finite().then(|| (figure * scale).round() / scale)
}

/// A part of a whole, from 0 to 1; `None` if there is no whole.
pub fn ratio(part: u64, whole: u64) -> Option<f64> {
    rounded(part.min(whole) as f64 / whole as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short_and_what_is_not_known_is_left_out() {
        assert_eq!(rounded(1.23456), Some(1.235));
        assert_eq!(rounded(12345.678), Some(12346.0));
        assert_eq!((ratio(1, 3), ratio(0, 0), ratio(3, 2)), (Some(0.333), None, Some(1.0)));
        assert_eq!(rounded(f64::NAN), None);
    }
}
