//! A visitor who comes while others keep asking, and the times between their tokens meanwhile.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::{Ask, Served, one, users_from};
use crate::node_fleet::NodeFleet;

/// Time for all users to get their first token before the visitor comes.
const LEAD: Duration = Duration::from_secs(1);

/// Who comes.
#[derive(Debug, Clone, Copy)]
pub enum Visitor<'a> {
    /// A prompt, until its first token.
    Prompt(&'a [u32]),
    /// Nobody, for that long.
    Nobody(Duration),
}

/// What a visit did.
#[derive(Debug)]
pub struct Visit {
    /// How long it took.
    pub span: Duration,
    /// Times between the users' tokens that overlap it, in milliseconds.
    pub gaps_ms: Vec<f64>,
}

/// Lets `n_users` users ask, and the visitor come after a second. `asks` are more than they get
/// answered meanwhile.
///
/// # Errors
/// A request that is refused or fails.
pub async fn visit(
    fleet: &NodeFleet,
    (n_users, asks): (usize, &[Ask<'_>]),
    visitor: Visitor<'_>,
) -> anyhow::Result<Visit> {
    let next = Cell::new(0);
    let epoch = Instant::now();
    let since = || epoch.elapsed().as_secs_f64() * 1e3;
    let comes = async {
        tokio::time::sleep(LEAD).await;
        let from_ms = since();
        let to_ms = match visitor {
            Visitor::Prompt(prompt) => {
                let ask = Ask { prompt, max_tokens: 1, draft_tokens: Some(0), ..Ask::default() };
                let served = one(fleet, &ask, epoch).await?;
                served.arrivals.first().map_or_else(since, |first| first.at_ms)
            }
            Visitor::Nobody(span) => {
                tokio::time::sleep(span).await;
                since()
            }
        };
        // Nobody asks anew; answers that are under way end.
        next.set(asks.len());
        anyhow::Ok((from_ms, to_ms))
    };
    let users = users_from(fleet, n_users, asks, (&next, epoch));
    let ((from_ms, to_ms), answers) = tokio::try_join!(comes, users)?;
    let span = Duration::from_secs_f64((to_ms - from_ms).max(0.0) / 1e3);
    Ok(Visit { span, gaps_ms: gaps(&answers, from_ms, to_ms) })
}

fn gaps(answers: &[Served], from_ms: f64, to_ms: f64) -> Vec<f64> {
    answers.iter().flat_map(|served| served.gaps_within_ms(from_ms, to_ms)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::served;

    #[test]
    fn only_times_during_the_visit_count() {
        let users = [
            served(0.0, &[(10.0, 1), (20.0, 1), (80.0, 1), (90.0, 1)]),
            served(0.0, &[(85.0, 1), (95.0, 1)]),
        ];
        assert_eq!(gaps(&users, 30.0, 50.0), [60.0]);
        assert_eq!(gaps(&users, 81.0, 100.0), [10.0, 10.0]);
    }
}
