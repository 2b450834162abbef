//! Asks a model over the broker: `cargo run --example ask -- "What is …?" [MODEL] [BROKER]`.
#![expect(clippy::print_stdout, reason = "the answer is what this program is for")]

use std::error::Error;
use std::io::Write as _;
use std::time::Duration;

use stagebus_bus::{Bus, BusOptions};
use stagebus_schemas::ids::ModelName;
use stagebus_schemas::messages::public::{ChatMessage, Event, PromptRequest};
use stagebus_schemas::subjects::Subjects;

/// Longest wait for an event.
const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut argument = |default: &str| arguments.next().unwrap_or_else(|| default.to_owned());
    let content = argument("What is the capital of Japan?");
    let model = ModelName::new(argument("smollm2-135m-instruct-q4_1"))?;
    let bus = Bus::connect(BusOptions::new(argument("nats://127.0.0.1:4222"), "ask")).await?;

    let said = ChatMessage { role: "user".to_owned(), content, ..ChatMessage::default() };
    let request = PromptRequest {
        messages: Some(vec![said]),
        max_tokens: Some(64),
        ..PromptRequest::default()
    };
    let mut events = bus.prompt(&Subjects::new(&model).prompt(), &request, PATIENCE).await?;
    while let Some(event) = events.next().await? {
        match event {
            Event::Token { text, .. } => {
                print!("{text}");
                std::io::stdout().flush()?;
            }
            Event::Error { class, message, .. } => {
                return Err(format!("{class:?}: {message}").into());
            }
            Event::Accepted { .. } | Event::Status { .. } | Event::Done { .. } => {}
        }
    }
    println!();
    Ok(())
}
