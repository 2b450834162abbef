//! Output that must fit a constraint: which tokens may come next.
//!
//! [`Grammars`] compiles the constraint of a request for one model, and the [`Guide`] that comes out
//! says which tokens may follow an output. That is a function of the constraint, the model's
//! vocabulary and the output's tokens alone, so whoever keeps a guide (the last stage, a drafter, a
//! coordinator that chooses) gets the same set, whatever was drafted, taken back or replayed before.
//!
//! The grammars are llguidance's. It works on the bytes of tokens, and those are the bytes that the
//! detokenizer puts out.

mod guide;

use std::fmt;
use std::io;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{ParserFactory, TokenParser};
use serde_json::{Value, json};
pub use stagebus_schemas::messages::constraint::Constraint;
use stagebus_shards::text::{TextError, TextModel};
use stagebus_shards::{ShardSet, ShardSetError};

use guide::Origin;
pub use guide::{Guide, GuideError, TokenSet};

/// What the lexer may spend on the tokens of one position, and on what is followed between two such
/// sets: about 7 ms.
const STEP_LEXER_FUEL: u64 = 100_000;

/// What compiling a constraint and following it may cost at most.
///
/// Chosen with `examples/constraints.rs`: a schema of 240 properties has room, and what is meant to
/// cost much is refused, or ends at the first position that takes more than some tens of
/// milliseconds. Fuel of the lexer is worth about 70 ns a unit. A state of a lexer takes one or two
/// kilobytes; schemas in use stay below some thousand.
const LIMITS: ParserLimits = ParserLimits {
    max_items_in_row: 600,
    initial_lexer_fuel: 200_000,
    step_lexer_fuel: STEP_LEXER_FUEL,
    step_max_items: 8_000,
    max_lexer_states: 20_000,
    max_grammar_size: 50_000,
    precompute_large_lexemes: true,
    verbose_errors: false,
};

/// Stack of the thread that compiles. The library descends once per rule of a chain of rules, and
/// the longest chain that a constraint has room for needs a quarter of this.
const STACK_BYTES: usize = 256 << 20;

/// Compiled constraints that are kept for those who ask for the same again.
const MAX_KEPT: usize = 16;

/// Largest of them, in bytes: those of schemas in use are smaller.
const MAX_KEPT_BYTES: usize = 4 << 20;

/// White space between two parts of a JSON text: a space, or a new line and an indentation. With room
/// for more, a model that is drawn from may go on with new lines until nothing is left of
/// `max_tokens`.
const JSON_WHITE_SPACE: &str = r"(\x20|\x0D?\x0A[\x20\x09]{0,20})";

/// The key under which llguidance looks for options in a JSON schema.
const SCHEMA_OPTIONS: &str = "x-guidance";

/// The reason where the grammar library has panicked.
const PANICKED: &str = "the grammar library fails on it";

/// Longest reason of the grammar library that is passed on, in bytes.
const MAX_REASON_BYTES: usize = 1024;

/// Why a constraint cannot be honoured.
#[derive(Debug, thiserror::Error)]
pub enum ConstraintError {
    /// The grammar is wrong, not supported, or too large.
    #[error("the constraint cannot be used: {reason}")]
    Grammar {
        /// What the grammar library says; it may quote the constraint.
        reason: String,
    },
    /// No output can begin: no text fits, or none that the model can write.
    #[error("the constraint cannot be used: {0}")]
    First(#[from] GuideError),
    /// Nothing can end the output.
    #[error("the model has no end token, which an output under a constraint needs")]
    NoEnd,
    /// The tokenizer does not do.
    #[error("the model's tokens cannot be used for constraints: {reason}")]
    Vocabulary {
        /// What the grammar library says.
        reason: String,
    },
    /// The shard set is damaged.
    #[error("the model's tokenizer cannot be used")]
    Shards(#[from] ShardSetError),
    /// The tokenizer cannot be read.
    #[error("the model's tokenizer cannot be read")]
    Tokenizer(#[from] TextError),
    /// There is no thread to compile in.
    #[error("the thread that compiles constraints cannot be started")]
    Thread(#[source] io::Error),
}

impl ConstraintError {
    /// Whether another constraint would do.
    #[must_use]
    pub const fn is_of_constraint(&self) -> bool {
        matches!(self, Self::Grammar { .. } | Self::First(_))
    }
}

/// Compiles constraints for one model, one at a time, so that whoever asks for much takes no more
/// than one processor. What all of them share is made at the first one.
pub struct Grammars {
    tokenizer: Tokenizer,
    vocab_size: usize,
    ends: Arc<[u32]>,
    /// Held by whoever compiles.
    compiler: Mutex<Option<ParserFactory>>,
    /// Compiled constraints with their texts, the last used one last.
    kept: Mutex<Vec<(String, Arc<Origin>)>>,
}

/// Where the bytes of the tokens come from.
enum Tokenizer {
    Loaded(Arc<TextModel>),
    InShards(PathBuf),
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars")
            .field("vocab_size", &self.vocab_size)
            .field("ends", &self.ends)
            .finish_non_exhaustive()
    }
}

impl Grammars {
    /// For a model with logits for `vocab_size` tokens, of which `ends` end a text.
    #[must_use]
    pub fn new(text: Arc<TextModel>, vocab_size: usize, ends: &[u32]) -> Self {
        Self::with(Tokenizer::Loaded(text), vocab_size, ends)
    }

    /// The same, from the shard set in a folder, whose text files are read, and checked, when they
    /// are needed.
    #[must_use]
    pub fn of_shards(dir: PathBuf, vocab_size: usize, ends: &[u32]) -> Self {
        Self::with(Tokenizer::InShards(dir), vocab_size, ends)
    }

    fn with(tokenizer: Tokenizer, vocab_size: usize, ends: &[u32]) -> Self {
        Self {
            tokenizer,
            vocab_size,
            ends: ends.into(),
            compiler: Mutex::new(None),
            kept: Mutex::new(Vec::new()),
        }
    }

    /// Compiles a constraint, unless it is kept from before. Takes some milliseconds as a rule, and
    /// some hundred the first time.
    ///
    /// # Errors
    /// [`ConstraintError`].
    pub fn compile(&self, constraint: &Constraint) -> Result<Guide, ConstraintError> {
        let text = constraint.to_json();
        if let Some(guide) = self.kept(&text) {
            return Ok(guide);
        }
        let mut compiler = lock(&self.compiler);
        // Somebody else may have been at it.
        if let Some(guide) = self.kept(&text) {
            return Ok(guide);
        }
        let factory = match &mut *compiler {
            Some(factory) => factory,
            none => none.insert(self.factory()?),
        };
        let parser = parser(factory, constraint)?;
        let origin = Arc::new(Origin::new(parser, Arc::clone(&self.ends))?);
        self.keep(text, &origin);
        Ok(Guide::new(origin))
    }

    fn kept(&self, text: &str) -> Option<Guide> {
        let mut kept = lock(&self.kept);
        let at = kept.iter().position(|(known, _)| known == text)?;
        let (text, origin) = kept.remove(at);
        let guide = Guide::new(Arc::clone(&origin));
        kept.push((text, origin));
        Some(guide)
    }

    fn keep(&self, text: String, origin: &Arc<Origin>) {
        if origin.n_bytes() > MAX_KEPT_BYTES {
            return;
        }
        let mut kept = lock(&self.kept);
        if kept.len() == MAX_KEPT {
            kept.remove(0);
        }
        kept.push((text, Arc::clone(origin)));
    }

    fn factory(&self) -> Result<ParserFactory, ConstraintError> {
        let text = match &self.tokenizer {
            Tokenizer::Loaded(text) => Arc::clone(text),
            Tokenizer::InShards(dir) => {
                ShardSet::open(dir)?.verify_text()?;
                Arc::new(TextModel::load(dir)?)
            }
        };
        let first_end = *self.ends.first().ok_or(ConstraintError::NoEnd)?;
        let words: Vec<Vec<u8>> =
            (0..self.vocab_size as u32).map(|token| word(&text, token)).collect();
        let build = || {
            let info = TokRxInfo::new(self.vocab_size as u32, first_end);
            let trie = TokTrie::from(&info, &words).with_eos_tokens(&self.ends);
            let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let mut factory = ParserFactory::new_simple(&tokens)?;
            factory.quiet();
            *factory.limits_mut() = LIMITS;
            Ok(factory)
        };
        catch_unwind(AssertUnwindSafe(build))
            .map_err(|error| ConstraintError::Vocabulary { reason: reason(&error) })
    }
}

/// What was changed under a lock is whole, also if its holder has panicked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Compiles a constraint on a thread with a large stack.
fn parser(
    factory: &ParserFactory,
    constraint: &Constraint,
) -> Result<TokenParser, ConstraintError> {
    let compile = || {
        let mut parser = factory.create_parser(grammar(constraint))?;
        parser.parser.grammar().lexer_spec().check_rollback()?;
        parser.start_without_prompt();
        Ok(parser)
    };
    let compiled = thread::scope(|scope| {
        thread::Builder::new()
            .name("grammar".to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, || catch_unwind(AssertUnwindSafe(compile)))
            .map(thread::ScopedJoinHandle::join)
    })
    .map_err(ConstraintError::Thread)?;
    match compiled {
        Ok(Ok(parser)) => Ok(parser),
        Ok(Err(error)) => Err(ConstraintError::Grammar { reason: reason(&error) }),
        Err(_panic) => Err(ConstraintError::Grammar { reason: PANICKED.to_owned() }),
    }
}

/// The bytes that a token stands for. Special tokens stand for nothing; the library knows them by a
/// marker that is part of no text.
fn word(text: &TextModel, token: u32) -> Vec<u8> {
    let bytes = text.text_bytes(token);
    let name = if bytes.is_empty() { text.token_bytes(token) } else { Vec::new() };
    if name.is_empty() {
        return bytes.to_vec();
    }
    [&[TokTrie::SPECIAL_TOKEN_MARKER], &name[..]].concat()
}

fn grammar(constraint: &Constraint) -> TopLevelGrammar {
    let grammar = match constraint {
        Constraint::JsonObject {} => json_grammar(json!({ "type": "object" })),
        Constraint::JsonSchema { schema } => json_grammar(schema.clone()),
        Constraint::Regex { pattern } => GrammarWithLexer::from_regex(pattern),
        Constraint::Choice { options } => {
            // A text in JSON's quotes is one in Lark's.
            let options: Vec<String> =
                options.iter().map(|option| Value::from(option.as_str()).to_string()).collect();
            GrammarWithLexer::from_lark(format!("start: {}", options.join(" | ")))
        }
        Constraint::Lark { grammar } => GrammarWithLexer::from_lark(grammar.clone()),
    };
    TopLevelGrammar::from_grammar(grammar)
}

fn json_grammar(mut schema: Value) -> GrammarWithLexer {
    // `true` takes every value.
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    if let Some(schema) = schema.as_object_mut() {
        schema
            .entry(SCHEMA_OPTIONS)
            .or_insert_with(|| json!({ "whitespace_pattern": JSON_WHITE_SPACE }));
    }
    GrammarWithLexer::from_json_schema(schema)
}

/// What the library says of an error, without its own state.
fn reason(error: &impl fmt::Display) -> String {
    let text = error.to_string();
    if text.starts_with("panic: ") {
        return PANICKED.to_owned();
    }
    let own = ["\n<non-verbose/>", "\n<backtrace>"];
    let end = own.iter().filter_map(|mark| text.find(mark)).min().unwrap_or(text.len());
    let mut end = end.min(MAX_REASON_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].trim_end().to_owned()
}

#[cfg(test)]
mod tests;
