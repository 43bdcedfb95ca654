//! The date and time of a chat template's `strftime_now`, by the directives of C and Python.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

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
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
/// Longest format.
const MAX_FORMAT: usize = 1024;

/// A second of the proleptic Gregorian calendar, UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DateTime {
    /// Seconds since 1970-01-01.
    seconds: u64,
}

impl DateTime {
    /// The date of conversations that are tokenized as data: 2024-07-26, which the templates of Llama 3.1 to 3.3 print where
    /// they have no clock.
    pub const OF_DATA: DateTime = DateTime { seconds: 1_721_952_000 };

    /// The present.
    pub fn present() -> DateTime {
        DateTime { seconds: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()) }
    }

    /// The text of a `strftime` format; `%-d` and the like are without leading zeros.
    pub fn format(self, format: &str) -> Result<String, String> {
        if format.len() > MAX_FORMAT {
            return Err(format!("strftime_now has a format of more than {MAX_FORMAT} bytes"));
        }
        let date = Date::of(self.seconds / 86_400);
        let [hour, minute, second] = [self.seconds / 3600 % 24, self.seconds / 60 % 60, self.seconds % 60];
        let hour_of_12 = (hour + 11) % 12 + 1;
        let mut out = String::new();
        let mut rest = format.chars();
        while let Some(c) = rest.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let first = rest.next();
            let padded = first != Some('-');
            let directive = if padded { first } else { rest.next() };
            let mut number = |n: u64, width: usize| {
                let width = if padded { width } else { 0 };
                out.push_str(&format!("{n:0width$}"));
            };
            match directive {
                Some('Y') => number(date.year, 4),
                Some('y') => number(date.year % 100, 2),
                Some('m') => number(date.month as u64 + 1, 2),
                Some('d') => number(date.day, 2),
                Some('j') => number(date.day_of_year, 3),
                Some('H') => number(hour, 2),
                Some('I') => number(hour_of_12, 2),
                Some('M') => number(minute, 2),
                Some('S') => number(second, 2),
                Some('B') => out.push_str(date.month_name()),
                Some('b') => out.push_str(&date.month_name()[..3]),
                Some('A') => out.push_str(date.day_name()),
                Some('a') => out.push_str(&date.day_name()[..3]),
                Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
                Some('%') => out.push('%'),
                _ => {
                    let what = "has a directive that is not supported (%Y %y %m %d %j %H %I %M %S %B %b %A %a %p %% are)";
                    return Err(format!("strftime_now({format:?}) {what}"));
                }
            }
        }
        Ok(out)
    }
}

impl fmt::Display for DateTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} s since 1970", self.seconds)
    }
}

struct Date {
    year: u64,
    /// From 0.
    month: usize,
    day: u64,
    day_of_year: u64,
    /// From Sunday.
    weekday: usize,
}

impl Date {
    /// The date so many days after 1970-01-01.
    fn of(days: u64) -> Date {
        // 400 years repeat. Days are counted from 1600-03-01 on, so that a leap day is the last of its year: of 400 years,
        // of 4, and of one.
        let since = days + 135_080;
        let (era, day) = (since / 146_097, since % 146_097);
        let year_of_era = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
        let day_from_march = day - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        // Months from March on have 31, 30, 31, 30, 31 days, twice, and then 31 and what is left.
        let month_from_march = (5 * day_from_march + 2) / 153;
        let month = (month_from_march as usize + 2) % 12;
        let year = 1600 + 400 * era + year_of_era + u64::from(month < 2);
        let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        let first_of_march = 59 + u64::from(is_leap);
        Date {
            year,
            month,
            day: day_from_march - (153 * month_from_march + 2) / 5 + 1,
            day_of_year: if month < 2 { day_from_march - 306 } else { day_from_march + first_of_march } + 1,
            weekday: ((days + 4) % 7) as usize,
        }
    }

    fn month_name(&self) -> &'static str {
        MONTHS[self.month]
    }

    fn day_name(&self) -> &'static str {
        DAYS[self.weekday]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As Python prints them.
    #[test]
    fn dates_are_pythons() {
        let all = "%Y-%m-%d %H:%M:%S %B %b %A %a %j %y %I %p %% %-d %-I %-m";
        for (seconds, want) in [
            (0, "1970-01-01 00:00:00 January Jan Thursday Thu 001 70 12 AM % 1 12 1"),
            (951782399, "2000-02-28 23:59:59 February Feb Monday Mon 059 00 11 PM % 28 11 2"),
            (951868800, "2000-03-01 00:00:00 March Mar Wednesday Wed 061 00 12 AM % 1 12 3"),
            (1721952000, "2024-07-26 00:00:00 July Jul Friday Fri 208 24 12 AM % 26 12 7"),
            (1735689599, "2024-12-31 23:59:59 December Dec Tuesday Tue 366 24 11 PM % 31 11 12"),
            (4107542400, "2100-03-01 00:00:00 March Mar Monday Mon 060 00 12 AM % 1 12 3"),
            (1709294400, "2024-03-01 12:00:00 March Mar Friday Fri 061 24 12 PM % 1 12 3"),
            (16725225599, "2499-12-31 23:59:59 December Dec Thursday Thu 365 99 11 PM % 31 11 12"),
        ] {
            assert_eq!(DateTime { seconds }.format(all).unwrap(), want);
        }
        assert_eq!(DateTime::OF_DATA.format("%d %b %Y").unwrap(), "26 Jul 2024");
        let e = DateTime::OF_DATA.format("%Q").unwrap_err();
        assert!(e.contains("%Q") && e.contains("%Y"), "{e}");
        assert!(
            DateTime::OF_DATA.format("%").is_err() && DateTime::OF_DATA.format(&"x".repeat(2000)).is_err()
        );
    }

    /// Every day of 400 years follows the one before.
    #[test]
    fn days_follow_each_other() {
        let mut before = Date::of(0);
        for days in 1..146_097 {
            let date = Date::of(days);
            let lengths =
                [31, 28 + u64::from(date_is_leap(before.year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
            let last = before.day == lengths[before.month];
            let want = match (last, before.month) {
                (false, m) => (before.year, m, before.day + 1, before.day_of_year + 1),
                (true, 11) => (before.year + 1, 0, 1, 1),
                (true, m) => (before.year, m + 1, 1, before.day_of_year + 1),
            };
            assert_eq!((date.year, date.month, date.day, date.day_of_year), want);
            before = date;
        }
    }

    fn date_is_leap(year: u64) -> bool {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    }
}
