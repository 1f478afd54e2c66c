//! Figures in few columns.

/// What is shown for an unknown figure.
const UNKNOWN: &str = "-";

/// A count or a rate: `7`, `0.4`, `1.2k`, `35k`, `1.2M`.
pub(super) fn count(figure: Option<f64>) -> String {
    let Some(figure) = figure.filter(|figure| figure.is_finite()) else {
        return UNKNOWN.to_owned();
    };
    let (figure, unit) = match figure.abs() {
        large if large >= 999_500.0 => (figure / 1e6, "M"),
        large if large >= 999.5 => (figure / 1e3, "k"),
        _ => (figure, ""),
    };
    match figure == figure.trunc() && unit.is_empty() || figure.abs() >= 9.95 {
        true => format!("{figure:.0}{unit}"),
        false => format!("{figure:.1}{unit}"),
    }
}

/// A time: `0.4ms`, `120ms`, `1.2s`, `35s`.
pub(super) fn time_ms(ms: Option<f64>) -> String {
    match ms.filter(|ms| ms.is_finite()) {
        None => UNKNOWN.to_owned(),
        Some(ms) if ms < 9.95 => format!("{ms:.1}ms"),
        Some(ms) if ms < 999.5 => format!("{ms:.0}ms"),
        Some(ms) if ms < 9_950.0 => format!("{:.1}s", ms / 1e3),
        Some(ms) => format!("{:.0}s", ms / 1e3),
    }
}

/// A share from 0 to 1 as a percentage.
pub(super) fn percent(ratio: Option<f64>) -> String {
    match ratio.filter(|ratio| ratio.is_finite()) {
        None => UNKNOWN.to_owned(),
        Some(ratio) => format!("{:.0}%", ratio * 100.0),
    }
}

/// An age in its largest unit: `3s`, `5m`, `2h`, `4d`.
pub(super) fn age(ms: u64) -> String {
    match ms / 1000 {
        s @ ..60 => format!("{s}s"),
        s @ ..3600 => format!("{}m", s / 60),
        s @ ..86_400 => format!("{}h", s / 3600),
        s => format!("{}d", s / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_take_few_columns() {
        let counts = [0.0, 0.04, 0.44, 7.0, 9.96, 12.3, 999.0, 999.6, 1234.0, 35_000.0, 1.25e6];
        let shown: Vec<_> = counts.into_iter().map(|figure| count(Some(figure))).collect();
        let expected = ["0", "0.0", "0.4", "7", "10", "12", "999", "1.0k", "1.2k", "35k", "1.2M"];
        assert_eq!(shown, expected);
        let times = [0.44, 9.96, 120.4, 999.6, 1234.0, 35_000.0];
        let shown: Vec<_> = times.into_iter().map(|ms| time_ms(Some(ms))).collect();
        assert_eq!(shown, ["0.4ms", "10ms", "120ms", "1.0s", "1.2s", "35s"]);
        assert_eq!(
            (percent(Some(0.456)), count(None), time_ms(None)),
            ("46%".into(), "-".into(), "-".into())
        );
        let ages = [59_999, 60_000, 3_600_000, 200_000_000].map(age);
        assert_eq!(ages, ["59s", "1m", "1h", "2d"]);
    }
}
