//! Which tokens may follow an output.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::SimpleVob;

use super::STEP_LEXER_FUEL;

/// A compiled constraint, with the output that it was asked about last: the next one usually goes on
/// from there, or from a little before.
pub struct Guide {
    origin: Arc<Origin>,
    /// The grammar after `followed`; made when it is needed.
    parser: Option<Box<TokenParser>>,
    followed: Vec<u32>,
    /// What the lexer had cost when it got its fuel.
    fuelled_at: usize,
}

/// The grammar at the beginning of the output, and the tokens that end one.
pub(super) struct Origin {
    parser: TokenParser,
    fuelled_at: usize,
    ends: Arc<[u32]>,
}

/// The tokens that may come next.
#[derive(Debug, Clone)]
pub struct TokenSet(SimpleVob);

/// Why it cannot be told what may come next.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GuideError {
    /// The output fits so far, but no token of the model goes on with it.
    #[error("the constraint leaves no token to go on with")]
    DeadEnd,
    /// It would take more time or memory than a constraint may.
    #[error("the constraint is too complex to be followed ({reason})")]
    TooComplex {
        /// The grammar library's word for it.
        reason: StopReason,
    },
}

impl From<StopReason> for GuideError {
    fn from(reason: StopReason) -> Self {
        match reason {
            StopReason::NoExtension | StopReason::NoExtensionBias => Self::DeadEnd,
            reason => Self::TooComplex { reason },
        }
    }
}

impl Origin {
    /// Finds out what may come first.
    ///
    /// # Errors
    /// Nothing may, or it is too complex to be told.
    pub(super) fn new(mut parser: TokenParser, ends: Arc<[u32]>) -> Result<Self, GuideError> {
        let fuelled_at = cost(&parser);
        match catch_unwind(AssertUnwindSafe(|| Ok(parser.compute_mask()))) {
            Ok(Ok(_)) => Ok(Self { parser, fuelled_at, ends }),
            Ok(Err(_)) => Err(parser.stop_reason().into()),
            Err(_) => Err(StopReason::InternalError.into()),
        }
    }

    /// Memory that every guide takes when it is used, in bytes.
    pub(super) fn n_bytes(&self) -> usize {
        self.parser.parser.lexer_stats().num_bytes
    }
}

/// What the lexer has cost so far.
fn cost(parser: &TokenParser) -> usize {
    parser.parser.lexer_stats().total_fuel_spent
}

impl fmt::Debug for Guide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guide").field("n_followed", &self.followed.len()).finish_non_exhaustive()
    }
}

impl Clone for Guide {
    /// A guide at the beginning of the output. The two share nothing that changes, so what one has
    /// met never counts for the other. Costs nothing before it is used.
    fn clone(&self) -> Self {
        Self::new(Arc::clone(&self.origin))
    }
}

impl Guide {
    /// A guide at the beginning of the output.
    pub(super) fn new(origin: Arc<Origin>) -> Self {
        let fuelled_at = origin.fuelled_at;
        Self { origin, parser: None, followed: Vec::new(), fuelled_at }
    }

    /// The tokens that may follow `output`. End tokens are among them where the output may end, and
    /// alone where it must. Nothing if `output` itself does not fit, or has ended: nobody waits for
    /// what comes behind it.
    ///
    /// # Errors
    /// [`GuideError`].
    pub fn next_tokens(&mut self, output: &[u32]) -> Result<Option<TokenSet>, GuideError> {
        if !self.follow(output)? {
            return Ok(None);
        }
        let parser = self.parser();
        if parser.stopped() {
            return Ok(Some(TokenSet(parser.token_env.tok_trie().eos_token_set())));
        }
        self.refuel()?;
        self.guarded(TokenParser::compute_mask).map(|set| Some(TokenSet(set)))
    }

    /// Whether one token may follow `output`. Costs much less than [`Self::next_tokens`].
    ///
    /// # Errors
    /// [`GuideError`].
    pub fn fits(&mut self, output: &[u32], token: u32) -> Result<bool, GuideError> {
        Ok(self.n_fitting(output, &[token])? > 0)
    }

    /// How many of the `drafted` tokens after `output` may come, one after the other.
    ///
    /// # Errors
    /// [`GuideError`].
    pub fn n_fitting(&mut self, output: &[u32], drafted: &[u32]) -> Result<usize, GuideError> {
        if !self.follow(output)? {
            return Ok(0);
        }
        if self.parser().stopped() {
            let ends = drafted.first().is_some_and(|token| self.origin.ends.contains(token));
            return Ok(usize::from(ends));
        }
        self.n_valid(drafted)
    }

    /// Brings the grammar to the end of `output`, and tells whether it fits.
    fn follow(&mut self, output: &[u32]) -> Result<bool, GuideError> {
        let same = self.followed.iter().zip(output).take_while(|(a, b)| a == b).count();
        let n_back = self.followed.len() - same;
        self.guarded(|parser| parser.rollback(n_back))?;
        self.followed.truncate(same);
        for token in &output[same..] {
            if self.origin.ends.contains(token) || !self.take(*token)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes one token, if it fits.
    fn take(&mut self, token: u32) -> Result<bool, GuideError> {
        if self.n_valid(&[token])? == 0 {
            return Ok(false);
        }
        self.guarded(|parser| {
            parser.consume_token(token)?;
            parser.check_stop()
        })?;
        self.followed.push(token);
        // Grammars that take back tokens of the output are not for us.
        if self.parser().num_tokens() == self.followed.len() {
            return Ok(true);
        }
        Err(self.restart(StopReason::InternalError))
    }

    /// How many tokens may come after what was followed, one after the other.
    fn n_valid(&mut self, tokens: &[u32]) -> Result<usize, GuideError> {
        self.refuel()?;
        let vocab_size = self.parser().token_env.tok_trie().vocab_size();
        let known = tokens.iter().take_while(|token| (**token as usize) < vocab_size).count();
        let n_valid = self.guarded(|parser| parser.validate_tokens_raw(&tokens[..known]))?;
        // A lexer without fuel refuses everything.
        match self.parser().parser.get_error().filter(|_| n_valid < known) {
            Some(error) => Err(self.restart(error.stop_reason())),
            None => Ok(n_valid),
        }
    }

    /// Gives the lexer new fuel when half of it is used up. The library does so only where it
    /// computes a set of tokens, and what is followed in between adds up.
    fn refuel(&mut self) -> Result<(), GuideError> {
        let spent = cost(self.parser());
        let is_low = (spent - self.fuelled_at) as u64 > STEP_LEXER_FUEL / 2;
        if !is_low || self.parser().stopped() {
            return Ok(());
        }
        self.guarded(|parser| {
            parser.invalidate_bias_cache();
            parser.compute_mask()
        })?;
        self.fuelled_at = spent;
        Ok(())
    }

    fn parser(&mut self) -> &mut TokenParser {
        let origin = &self.origin;
        self.parser.get_or_insert_with(|| Box::new(origin.parser.deep_clone()))
    }

    /// Lets the library work, which may fail or panic.
    fn guarded<T, E>(
        &mut self,
        work: impl FnOnce(&mut TokenParser) -> Result<T, E>,
    ) -> Result<T, GuideError> {
        let parser = self.parser();
        match catch_unwind(AssertUnwindSafe(|| Ok(work(parser)))) {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(_)) => {
                let reason = self.parser().stop_reason();
                Err(self.restart(reason))
            }
            Err(_) => Err(self.restart(StopReason::InternalError)),
        }
    }

    /// Goes back to the beginning after an error, which must not count for another output.
    fn restart(&mut self, reason: StopReason) -> GuideError {
        *self = self.clone();
        reason.into()
    }
}

impl TokenSet {
    /// Whether a token is one of them.
    #[must_use]
    pub fn contains(&self, token: u32) -> bool {
        (token as usize) < self.0.len() && self.0.is_allowed(token)
    }

    /// Rules out the logits of all other tokens.
    ///
    /// **Shape**: `logits` is `[vocab_size]`.
    pub fn rule_out_others(&self, logits: &mut [f32]) {
        // Beyond the set there is no token.
        let words = self.0.as_slice().iter().chain(std::iter::repeat(&0));
        for (word, logits) in words.zip(logits.chunks_mut(u32::BITS as usize)) {
            match *word {
                u32::MAX => {}
                0 => logits.fill(f32::NEG_INFINITY),
                word => {
                    let others = logits.iter_mut().enumerate().filter(|(i, _)| word >> i & 1 == 0);
                    others.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
                }
            }
        }
    }
}
