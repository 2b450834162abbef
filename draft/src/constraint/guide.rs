//! Which tokens may follow an output.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::SimpleVob;

/// A compiled constraint, with the output that it was asked about last: the next one usually goes on
/// from there, or from a little before.
pub struct Guide {
    /// The grammar at the beginning of the output.
    origin: Arc<TokenParser>,
    /// The grammar after `followed`.
    parser: Box<TokenParser>,
    followed: Vec<u32>,
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

impl fmt::Debug for Guide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guide").field("n_followed", &self.followed.len()).finish_non_exhaustive()
    }
}

impl Clone for Guide {
    /// A guide at the beginning of the output. The two share nothing that changes, so what one has
    /// met never counts for the other.
    fn clone(&self) -> Self {
        Self {
            origin: Arc::clone(&self.origin),
            parser: Box::new(self.origin.deep_clone()),
            followed: Vec::new(),
            ends: Arc::clone(&self.ends),
        }
    }
}

impl Guide {
    /// Guides from `origin`, the grammar at the beginning of the output.
    pub(super) fn new(origin: TokenParser, ends: Arc<[u32]>) -> Self {
        let parser = Box::new(origin.deep_clone());
        Self { origin: Arc::new(origin), parser, followed: Vec::new(), ends }
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
        let parser = &mut self.parser;
        if parser.stopped() {
            return Ok(Some(TokenSet(parser.token_env.tok_trie().eos_token_set())));
        }
        match catch_unwind(AssertUnwindSafe(|| parser.compute_mask())) {
            Ok(set) => Ok(Some(TokenSet(set))),
            Err(_) => Err(self.restart()),
        }
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
        let parser = &mut self.parser;
        if parser.stopped() {
            let ends = drafted.first().is_some_and(|token| self.ends.contains(token));
            return Ok(usize::from(ends));
        }
        match catch_unwind(AssertUnwindSafe(|| parser.validate_tokens_raw(drafted))) {
            Ok(n_fitting) => Ok(n_fitting),
            Err(_) => Err(self.restart()),
        }
    }

    /// Brings the grammar to the end of `output`, and tells whether it fits.
    fn follow(&mut self, output: &[u32]) -> Result<bool, GuideError> {
        let same = self.followed.iter().zip(output).take_while(|(a, b)| a == b).count();
        let (parser, n_back) = (&mut self.parser, self.followed.len() - same);
        if catch_unwind(AssertUnwindSafe(|| parser.rollback(n_back))).is_err() {
            return Err(self.restart());
        }
        self.followed.truncate(same);
        for token in &output[same..] {
            if self.ends.contains(token) || !self.take(*token)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes one token, if it fits.
    fn take(&mut self, token: u32) -> Result<bool, GuideError> {
        let parser = &mut self.parser;
        if token as usize >= parser.token_env.tok_trie().vocab_size() {
            return Ok(false);
        }
        let taken = catch_unwind(AssertUnwindSafe(|| {
            if !parser.validate_token(token)? {
                return Ok(false);
            }
            parser.consume_token(token)?;
            parser.check_stop()?;
            Ok(true)
        }));
        match taken {
            Ok(false) => Ok(false),
            Ok(true) => {
                self.followed.push(token);
                // Grammars that take back tokens of the output are not for us.
                if self.parser.num_tokens() == self.followed.len() {
                    return Ok(true);
                }
                Err(self.restart())
            }
            Err(_) => Err(self.restart()),
        }
    }

    /// Goes back to the beginning after an error, which must not count for another output.
    fn restart(&mut self) -> GuideError {
        let reason = self.parser.stop_reason();
        *self.parser = self.origin.deep_clone();
        self.followed.clear();
        match reason {
            StopReason::NoExtension | StopReason::NoExtensionBias => GuideError::DeadEnd,
            reason => GuideError::TooComplex { reason },
        }
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
