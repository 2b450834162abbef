//! What every scenario shares: interleaving, summaries, claims, tables, plots, the machine and the
//! origin of a result.

pub mod claims;
pub mod machine;
pub mod origin;
pub mod output;
pub mod plot;
pub mod stats;
pub mod table;

/// Takes every contender in turn, once per round: A B C, A B C, ... Whatever slows the machine for
/// a while then meets all of them.
///
/// # Errors
/// The first error of a turn.
pub async fn interleave<C>(
    n_rounds: usize,
    contenders: &mut [C],
    mut turn: impl AsyncFnMut(&mut C, usize) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    for round in 0..n_rounds {
        for contender in contenders.iter_mut() {
            turn(contender, round).await?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn contenders_take_turns_and_an_error_ends_the_rounds() {
        let mut order = String::new();
        let mut contenders = ['a', 'b'];
        interleave(2, &mut contenders, async |contender, round| {
            order.push_str(&format!("{contender}{round} "));
            Ok(())
        })
        .await
        .expect("no turn fails");
        assert_eq!(order, "a0 b0 a1 b1 ");
        let result = interleave(2, &mut contenders, async |contender, _| {
            anyhow::ensure!(*contender == 'a', "no");
            order.push('c');
            Ok(())
        });
        result.await.expect_err("the second contender fails");
        assert_eq!(order, "a0 b0 a1 b1 c");
    }
}
