//! Spans of time as people and table configs write them.

use std::time::Duration;

use crate::error::{Error, Result};

const NANOS: u128 = 1_000_000_000;

/// Units of time, in nanoseconds. A month is 30.44 days and a year 365.25, as in Lance.
fn unit(name: &str) -> Option<u128> {
    const HOUR: u128 = 3600 * NANOS;
    const DAY: u128 = 24 * HOUR;
    Some(match name {
        "nanos" | "nsec" | "ns" => 1,
        "usec" | "us" | "µs" => 1_000,
        "millis" | "msec" | "ms" => 1_000_000,
        "seconds" | "second" | "secs" | "sec" | "s" => NANOS,
        "minutes" | "minute" | "mins" | "min" | "m" => 60 * NANOS,
        "hours" | "hour" | "hrs" | "hr" | "h" => HOUR,
        "days" | "day" | "d" => DAY,
        "weeks" | "week" | "wks" | "wk" | "w" => 7 * DAY,
        "months" | "month" | "M" => 2_630_016 * NANOS,
        "years" | "year" | "yrs" | "yr" | "y" => 31_557_600 * NANOS,
        _ => return None,
    })
}

/// Reads a span of time: numbers with units, one after the other (`7d`, `1h 30min`, `2weeks`,
/// `1.5d`). The language is that of `lance.auto_cleanup.older_than`; a zero needs no unit.
///
/// # Errors
/// [`Error::InvalidInput`] with the accepted forms.
pub fn parse_duration(text: &str) -> Result<Duration> {
    let wrong = |what: &str| {
        Error::invalid(format!(
            "{text:?} is no span of time: {what} (write 7d, 12h, 1h 30min or 2weeks)"
        ))
    };
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err(wrong("it is empty"));
    }
    if rest.bytes().all(|b| b == b'0') {
        return Ok(Duration::ZERO);
    }
    let overflow = || wrong("it is too long");
    let mut total: u128 = 0;
    while !rest.is_empty() {
        let end = rest
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(rest.len());
        let (number, after) = rest.split_at(end);
        let after = after.trim_start();
        let end = after
            .find(|c: char| !c.is_alphabetic())
            .unwrap_or(after.len());
        let (name, after) = after.split_at(end);
        let nanos = match unit(name) {
            Some(nanos) => nanos,
            None if name.is_empty() => return Err(wrong("a number has no unit")),
            None => return Err(wrong(&format!("{name:?} is no unit"))),
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        let parse = |digits: &str| {
            digits
                .parse::<u64>()
                .map(u128::from)
                .map_err(|_| wrong(&format!("{number:?} is no number")))
        };
        let scale = u32::try_from(fraction.len())
            .ok()
            .and_then(|digits| 10u128.checked_pow(digits))
            .ok_or_else(overflow)?;
        let part = parse(fraction)?.checked_mul(nanos).ok_or_else(overflow)? / scale;
        total = parse(whole)?
            .checked_mul(nanos)
            .and_then(|whole| whole.checked_add(part))
            .and_then(|sum| sum.checked_add(total))
            .ok_or_else(overflow)?;
        rest = after.trim_start();
    }
    let seconds = u64::try_from(total / NANOS).map_err(|_| overflow())?;
    let nanos = u32::try_from(total % NANOS).map_err(|_| overflow())?;
    Ok(Duration::new(seconds, nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_lance_reads() {
        let day = 86_400;
        for (text, seconds) in [
            ("7d", 7 * day),
            ("14days", 14 * day),
            ("2weeks", 14 * day),
            ("1day 2h", day + 7200),
            ("1h30min", 5400),
            ("15days 2min 2s", 15 * day + 122),
            ("0", 0),
            ("0s", 0),
            ("1M", 2_630_016),
            ("1.5d", day + day / 2),
        ] {
            assert_eq!(
                parse_duration(text).expect("a span"),
                Duration::from_secs(seconds),
                "{text}"
            );
        }
        assert_eq!(
            parse_duration("1s 500ms 7us 3ns").expect("a span"),
            Duration::new(1, 500_007_003)
        );
    }

    #[test]
    fn refuses_what_is_not_clear() {
        for text in [
            "",
            " ",
            "7",
            "d",
            "7 fortnights",
            "-1d",
            "1..5d",
            "1d2",
            "99999999999999999999y",
            "18446744073709551615y",
        ] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}
