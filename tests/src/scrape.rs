//! Reading a process's metrics as Prometheus does, and more strictly.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use anyhow::{Context, Result, bail, ensure};
use stagebus_fleet::Member;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::wait::PATIENCE;

/// Labels with their values.
type Labels = BTreeMap<String, String>;

/// The metrics of one process at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Scrape {
    samples: BTreeMap<(String, Labels), f64>,
}

impl Scrape {
    /// Scrapes a process of the fleet.
    ///
    /// # Errors
    /// It shows no metrics, does not answer, or the answer is not OpenMetrics text.
    pub async fn of(member: &Member) -> Result<Self> {
        let name = &member.name;
        let address = member.metrics.with_context(|| format!("{name} shows no metrics"))?;
        let body = get(address, "/metrics").await.with_context(|| format!("{name}: /metrics"))?;
        Self::parse(&body).with_context(|| format!("{name} shows\n{body}"))
    }

    /// Reads OpenMetrics text: every sample belongs to a declared family and comes once, buckets are
    /// cumulative, and the text has an end.
    ///
    /// # Errors
    /// What is wrong, and in which line.
    pub fn parse(text: &str) -> Result<Self> {
        let lines = text.strip_suffix("# EOF\n").context("the text has no end")?.lines();
        let mut families: BTreeMap<&str, &str> = BTreeMap::new();
        let mut samples = BTreeMap::new();
        for line in lines {
            if let Some(comment) = line.strip_prefix("# ") {
                match comment.splitn(3, ' ').collect::<Vec<_>>()[..] {
                    ["TYPE", family, kind @ ("counter" | "gauge" | "histogram")] => {
                        ensure!(families.insert(family, kind).is_none(), "{line}: comes twice");
                    }
                    ["HELP", _, help] if help.ends_with('.') => {}
                    ["UNIT", family, unit @ ("seconds" | "bytes")] => {
                        ensure!(family.ends_with(unit), "{line}: the name lacks it");
                    }
                    _ => bail!("{line}: no such comment"),
                }
                continue;
            }
            let (name, labels, value) = sample(line).with_context(|| line.to_owned())?;
            let belongs = families.iter().any(|(family, kind)| {
                let end = name.strip_prefix(family);
                match *kind {
                    "counter" => end == Some("_total"),
                    "gauge" => end == Some(""),
                    _ => matches!(end, Some("_bucket" | "_sum" | "_count")),
                }
            });
            ensure!(belongs, "{line}: belongs to no family");
            ensure!(samples.insert((name, labels), value).is_none(), "{line}: comes twice");
        }
        let scrape = Self { samples };
        let mut histograms = families.iter().filter(|(_, kind)| **kind == "histogram");
        histograms.try_for_each(|(family, _)| scrape.check_buckets(family))?;
        Ok(scrape)
    }

    /// Buckets rise with their limits, and the last one is the count.
    fn check_buckets(&self, family: &str) -> Result<()> {
        let mut by_series: BTreeMap<Labels, Vec<(f64, f64)>> = BTreeMap::new();
        for ((_, labels), value) in self.named(&format!("{family}_bucket")) {
            let mut labels = labels.clone();
            let limit = labels.remove("le").with_context(|| format!("{family}: no limit"))?;
            by_series.entry(labels).or_default().push((limit.parse()?, *value));
        }
        for (labels, mut buckets) in by_series {
            buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
            let rises = buckets.is_sorted_by(|a, b| a.1 <= b.1);
            let last = buckets.last().copied();
            let count = self.samples.get(&(format!("{family}_count"), labels)).copied();
            let ends = last.map(|(limit, n)| (limit, Some(n))) == Some((f64::INFINITY, count));
            ensure!(rises && ends, "{family}: {buckets:?}, count {count:?}");
        }
        Ok(())
    }

    /// The value of the one sample of this name that has these labels, among others.
    ///
    /// # Errors
    /// There is none, or several.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Result<f64> {
        let has_all = |found: &Labels| {
            labels.iter().all(|(label, value)| found.get(*label).is_some_and(|f| f == value))
        };
        let mut found = self.named(name).filter(|((_, found), _)| has_all(found));
        match (found.next(), found.next()) {
            (Some((_, value)), None) => Ok(*value),
            (None, _) => bail!("no sample {name} {labels:?}"),
            (Some(_), Some(_)) => bail!("several samples {name} {labels:?}"),
        }
    }

    /// The sum of all samples of this name.
    #[must_use]
    pub fn sum(&self, name: &str) -> f64 {
        self.named(name).map(|(_, value)| value).sum()
    }

    /// Names of all samples.
    #[must_use]
    pub fn names(&self) -> BTreeSet<&str> {
        self.samples.keys().map(|(name, _)| name.as_str()).collect()
    }

    fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (&'a (String, Labels), &'a f64)> {
        self.samples.iter().filter(move |((found, _), _)| found == name)
    }
}

/// Name, labels and value of a line.
fn sample(line: &str) -> Result<(String, Labels, f64)> {
    let (series, value) = line.rsplit_once(' ').context("no value")?;
    let value: f64 = value.parse()?;
    ensure!(value >= 0.0, "below 0");
    let (name, rest) = match series.split_once('{') {
        None => (series, ""),
        Some((name, rest)) => (name, rest.strip_suffix('}').context("an open brace")?),
    };
    let is_word = |word: &str| {
        !word.is_empty()
            && word.chars().all(|c| c.is_ascii_lowercase() || c.is_numeric() || c == '_')
    };
    ensure!(is_word(name), "no name");
    let mut labels = Labels::new();
    for label in rest.split(',').filter(|label| !label.is_empty()) {
        let (label, value) = label.split_once("=\"").context("a label without a value")?;
        let value = value.strip_suffix('"').context("an open quote")?;
        ensure!(is_word(label) && !value.contains(['"', '\\']), "a strange label");
        ensure!(labels.insert(label.to_owned(), value.to_owned()).is_none(), "a label twice");
    }
    Ok((name.to_owned(), labels, value))
}

/// The body of an answer with success.
///
/// # Errors
/// There is no such answer.
pub async fn get(address: SocketAddr, path: &str) -> Result<String> {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    let answer = tokio::time::timeout(PATIENCE, exchange).await??;
    let (head, body) = answer.split_once("\r\n\r\n").context("no body")?;
    ensure!(head.starts_with("HTTP/1.1 200"), "{head}");
    Ok(body.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "\
# HELP a_seconds Time.\n# TYPE a_seconds histogram\n# UNIT a_seconds seconds\n\
a_seconds_sum{x=\"1\"} 0.5\na_seconds_count{x=\"1\"} 2\n\
a_seconds_bucket{le=\"0.1\",x=\"1\"} 1\na_seconds_bucket{le=\"+Inf\",x=\"1\"} 2\n\
# HELP b Number.\n# TYPE b counter\nb_total{x=\"1\",y=\"u\"} 3\nb_total{x=\"1\",y=\"v\"} 4\n# EOF\n";

    #[test]
    fn text_is_read() {
        let scrape = Scrape::parse(GOOD).expect("text");
        assert_eq!(scrape.value("b_total", &[("y", "v")]).expect("a value").to_string(), "4");
        assert_eq!(scrape.sum("b_total").to_string(), "7");
        assert!(scrape.value("b_total", &[("x", "1")]).is_err(), "there are two");
        assert!(scrape.value("b_total", &[("y", "w")]).is_err(), "there is none");
        assert!(scrape.names().contains("a_seconds_count"));
    }

    #[test]
    fn text_that_is_wrong_is_refused() {
        for (right, wrong) in [
            ("# EOF\n", ""),
            ("b_total{x=\"1\",y=\"v\"} 4", "b_total{x=\"1\",y=\"u\"} 4"),
            ("b_total{x=\"1\",y=\"v\"} 4", "c_total 4"),
            ("y=\"v\"", "y=\"v"),
            ("} 4", "} four"),
            ("le=\"0.1\",x=\"1\"} 1", "le=\"0.1\",x=\"1\"} 3"),
            ("_count{x=\"1\"} 2", "_count{x=\"1\"} 5"),
            ("# TYPE b counter", "# TYPE b number"),
            ("# UNIT a_seconds seconds", "# UNIT a_seconds bytes"),
        ] {
            let text = GOOD.replacen(right, wrong, 1);
            assert_ne!(text, GOOD);
            assert!(Scrape::parse(&text).is_err(), "{wrong:?} was taken");
        }
    }
}
