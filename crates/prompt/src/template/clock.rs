//! `strftime_now`, for templates that print today's date. The time comes from the caller, so that
//! rendering stays a function of its arguments.

use std::cell::Cell;
use std::fmt::Write as _;

use minijinja::{Error, ErrorKind};

thread_local! {
    /// The time for the render that runs on this thread, and whether the template read it.
    static NOW: Cell<(i64, bool)> = const { Cell::new((0, false)) };
}

/// Runs `render` with `now_unix_s` as the time; also returns whether the time was read.
pub(super) fn with_now<T>(now_unix_s: i64, render: impl FnOnce() -> T) -> (T, bool) {
    NOW.set((now_unix_s, false));
    let result = render();
    (result, NOW.get().1)
}

/// The template function. Engines use their local time zone, which is UTC in containers, so UTC is
/// used here.
pub(super) fn strftime_now(format: &str) -> Result<String, Error> {
    let (now, _) = NOW.get();
    NOW.set((now, true));
    strftime(format, now).ok_or_else(|| {
        Error::new(ErrorKind::InvalidOperation, "strftime_now: unsupported format directive")
    })
}

const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Python's `strftime` in the C locale and UTC; `None` for directives whose result depends on the
/// platform or the locale.
pub(super) fn strftime(format: &str, now_unix_s: i64) -> Option<String> {
    let days = now_unix_s.div_euclid(86_400);
    let second_of_day = now_unix_s.rem_euclid(86_400);
    let (hour, minute, second) =
        (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    let (year, month, day) = civil_from_days(days);
    let weekday = DAYS[(days + 4).rem_euclid(7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(ch) = chars.next() {
        if ch != '%' {
            out.push(ch);
            continue;
        }
        let mut directive = chars.next()?;
        let padded = directive != '-';
        if !padded {
            directive = chars.next()?;
        }
        let (number, width) = match directive {
            'd' => (day, 2),
            'm' => (month, 2),
            'H' => (hour, 2),
            'I' => (hour12, 2),
            'M' => (minute, 2),
            'S' => (second, 2),
            'y' => (year.rem_euclid(100), 2),
            'j' => (days - days_from_new_year(year) + 1, 3),
            other if padded => {
                match other {
                    'Y' => write!(out, "{year}").ok()?,
                    'B' => out.push_str(month_name),
                    'b' | 'h' => out.push_str(&month_name[..3]),
                    'A' => out.push_str(weekday),
                    'a' => out.push_str(&weekday[..3]),
                    'p' => out.push_str(if hour < 12 { "AM" } else { "PM" }),
                    'F' => write!(out, "{year}-{month:02}-{day:02}").ok()?,
                    'T' => write!(out, "{hour:02}:{minute:02}:{second:02}").ok()?,
                    '%' => out.push('%'),
                    _ => return None,
                }
                continue;
            }
            _ => return None,
        };
        let width = if padded { width } else { 1 };
        write!(out, "{number:0width$}").ok()?;
    }
    Some(out)
}

fn days_from_new_year(year: i64) -> i64 {
    let before = year - 1;
    before * 365 + before.div_euclid(4) - before.div_euclid(100) + before.div_euclid(400) - 719_162
}

/// Proleptic Gregorian date of a day count since 1970-01-01.
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    // Years start in March, so that the leap day is the last day of a year.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::strftime;

    #[test]
    fn dates_are_written_as_python_writes_them() {
        let now = 1_709_210_096; // 2024-02-29 12:34:56 UTC
        assert_eq!(strftime("%d %b %Y", now).unwrap(), "29 Feb 2024");
        assert_eq!(
            strftime("%A, %B %-d, %Y %I:%M:%S %p", now).unwrap(),
            "Thursday, February 29, 2024 12:34:56 PM"
        );
        assert_eq!(strftime("%F %T %y %j %%", now).unwrap(), "2024-02-29 12:34:56 24 060 %");
        assert_eq!(strftime("%Y-%m-%d %j", 0).unwrap(), "1970-01-01 001");
        assert_eq!(strftime("%Y-%m-%d %a", -1).unwrap(), "1969-12-31 Wed");
        assert_eq!(strftime("%c", now), None);
        assert_eq!(strftime("%", now), None);
    }
}
