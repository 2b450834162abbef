//! Renders a model's chat template as the `transformers` library does.
//!
//! Templates are Jinja programs that come with the model. They see `messages`,
//! `tools`, `add_generation_prompt`, `bos_token` and `eos_token`, and may call `raise_exception` and
//! `strftime_now`. The number of steps is limited, so that a bad template ends; the memory that
//! it takes is not, so a model from an untrusted source stays a risk of its own.

use std::fmt;

use minijinja::value::{Kwargs, Value};
use minijinja::{AutoEscape, Environment, ErrorKind, context};
use serde::Serialize;

use super::error::TextError;
use super::tool_chat::{self, TOOL_CALL_OPEN};

/// Steps of the template engine that one rendering may take. A chat of 1,000 messages takes
/// about 50,000, and the limit is reached within a second.
const MAX_STEPS: u64 = 5_000_000;
const NAME: &str = "chat_template.jinja";

/// A compiled chat template with the model's special tokens.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: Option<String>,
    eos: Option<String>,
    knows_tools: bool,
}

/// What a template says when it calls `raise_exception`.
#[derive(Debug)]
struct Refusal(String);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

impl ChatTemplate {
    /// Compiles a template; `bos` and `eos` are the texts of the model's special tokens.
    ///
    /// # Errors
    /// [`TextError::TemplateSyntax`] if it is not a Jinja template.
    pub fn new(source: &str, bos: Option<&str>, eos: Option<&str>) -> Result<Self, TextError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_auto_escape_callback(|_name| AutoEscape::None);
        environment.set_fuel(Some(MAX_STEPS));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        environment.add_test("iterable", is_iterable);
        environment
            .add_template_owned(NAME, without_generation_tags(source))
            .map_err(|source| TextError::TemplateSyntax { source })?;
        let knows_tools = source.contains(TOOL_CALL_OPEN)
            && environment
                .get_template(NAME)
                .is_ok_and(|template| template.undeclared_variables(false).contains("tools"));
        let (bos, eos) = (bos.map(str::to_owned), eos.map(str::to_owned));
        Ok(Self { environment, bos, eos, knows_tools })
    }

    /// Renders messages (anything with `role` and `content`, and with `tool_calls` for calls of
    /// functions) and the functions that the model may call; with `add_generation_prompt` the text
    /// ends where the model's answer begins.
    ///
    /// A template that does not know of functions, or has calls in another form than between
    /// [`TOOL_CALL_OPEN`] and its like, gets them as text (`tool_chat`).
    ///
    /// # Errors
    /// [`TextError::TemplateRefusal`] if the template does not take these messages,
    /// [`TextError::TemplateTooLong`] and [`TextError::Template`] if it fails, [`TextError::Chat`]
    /// for messages or functions that are no JSON.
    pub fn render<M: Serialize, T: Serialize>(
        &self,
        messages: &[M],
        tools: &[T],
        add_generation_prompt: bool,
    ) -> Result<String, TextError> {
        if self.knows_tools {
            let tools = (!tools.is_empty()).then_some(tools);
            let messages = Value::from_serialize(messages);
            return self.fill(messages, Value::from_serialize(tools), add_generation_prompt);
        }
        let plain =
            tool_chat::plain(messages, tools).map_err(|source| TextError::Chat { source })?;
        let messages = match plain {
            Some(messages) => Value::from_serialize(messages),
            None => Value::from_serialize(messages),
        };
        self.fill(messages, Value::from(()), add_generation_prompt)
    }

    fn fill(
        &self,
        messages: Value,
        tools: Value,
        add_generation_prompt: bool,
    ) -> Result<String, TextError> {
        let mut variables = vec![
            ("messages", messages),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
            // Templates test these for none, not for being defined.
            ("tools", tools),
            ("documents", Value::from(())),
        ];
        variables.extend(self.bos.as_deref().map(|bos| ("bos_token", Value::from(bos))));
        variables.extend(self.eos.as_deref().map(|eos| ("eos_token", Value::from(eos))));
        let variables = Value::from_iter(variables);
        let rendered = self
            .environment
            .get_template(NAME)
            .and_then(|template| template.render(context! { ..variables }));
        rendered.map_err(failure)
    }
}

/// Finds out why a rendering failed.
fn failure(error: minijinja::Error) -> TextError {
    if error.kind() == ErrorKind::OutOfFuel {
        return TextError::TemplateTooLong { steps: MAX_STEPS };
    }
    let mut cause = std::error::Error::source(&error);
    while let Some(inner) = cause {
        if let Some(Refusal(reason)) = inner.downcast_ref() {
            return TextError::TemplateRefusal { reason: reason.clone() };
        }
        cause = inner.source();
    }
    TextError::Template { source: error }
}

fn raise_exception(reason: String) -> Result<Value, minijinja::Error> {
    let error = minijinja::Error::new(ErrorKind::InvalidOperation, "the template refuses");
    Err(error.with_source(Refusal(reason)))
}

/// The local time in the format of C's `strftime`.
fn strftime_now(format: &str) -> Result<String, minijinja::Error> {
    jiff::fmt::strtime::format(format, &jiff::Zoned::now()).map_err(|error| {
        minijinja::Error::new(ErrorKind::InvalidOperation, "bad time format").with_source(error)
    })
}

/// In Python none cannot be iterated, and templates ask `tools is iterable` to find out whether
/// there are tools.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// JSON as Python writes it: nothing escaped for HTML, and a space after `:` and `,`.
fn to_json(value: Value, kwargs: Kwargs) -> Result<Value, minijinja::Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    // Python's other options change what the models were not trained on.
    kwargs.get::<Option<bool>>("ensure_ascii")?;
    kwargs.assert_all_used()?;
    let written = match indent {
        Some(indent) => {
            let indent = " ".repeat(indent.min(16));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            write_json(&value, formatter)
        }
        None => python_json(&value),
    };
    let json = written.map_err(|error| {
        minijinja::Error::new(ErrorKind::BadSerialization, "cannot write JSON").with_source(error)
    })?;
    Ok(Value::from(json))
}

/// JSON as Python's `json.dumps` writes it.
pub(super) fn python_json(value: &impl Serialize) -> Result<String, serde_json::Error> {
    write_json(value, PythonFormatter)
}

fn write_json(
    value: &impl Serialize,
    formatter: impl serde_json::ser::Formatter,
) -> Result<String, serde_json::Error> {
    let mut json = Vec::new();
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut json, formatter))?;
    Ok(String::from_utf8_lossy(&json).into_owned())
}

/// Separators of Python's `json.dumps`.
struct PythonFormatter;

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

/// Replaces the `generation` tag, which marks answers for training and prints its content, by a
/// condition that always holds.
fn without_generation_tags(source: &str) -> String {
    let mut rest = source;
    let mut plain = String::with_capacity(source.len());
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start..].find("%}") else { break };
        let (before, tag) = (&rest[..start], &rest[start..start + len]);
        plain.push_str(before);
        let word = tag[2..].trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        match word {
            "generation" => plain.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => plain.push_str(&tag.replace("endgeneration", "endif")),
            _ => plain.push_str(tag),
        }
        rest = &rest[start + len..];
    }
    plain.push_str(rest);
    plain
}
