//! Durable jobs: what they survive, and what becomes of them.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stagebus_bus::Results;
use stagebus_fleet::BrokerChoice;
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::ids::RequestId;
use stagebus_schemas::messages::fleet::CoordinatorAnnouncement;
use stagebus_schemas::messages::public::{FinishReason, PromptRequest};
use stagebus_tests::answer::Answer;
use stagebus_tests::broker::PlainBroker;
use stagebus_tests::fleet::Fleet;
use stagebus_tests::program::Call;
use stagebus_tests::wait;

use crate::prompts::{self, cases};

/// A dead coordinator is noticed soon.
const ACK_WAIT: &str = "coordinator.jobs.ack_wait_ms=1000";

fn named(name: &str, request: &Value) -> Result<PromptRequest> {
    let mut request = request.clone();
    request["request_id"] = json!(name);
    Ok(serde_json::from_value(request)?)
}

/// A job that takes a while.
fn long() -> Value {
    let mut request = prompts::endless();
    request["max_tokens"] = json!(150);
    request
}

async fn submit(fleet: &Fleet, name: &str, request: &Value) -> Result<()> {
    let submitted = fleet.bus.submit(&fleet.subjects(), named(name, request)?).await?;
    ensure!(!submitted.duplicate, "{name} was there already");
    Ok(())
}

async fn results(fleet: &Fleet, name: &str) -> Result<Results> {
    Ok(fleet.bus.results(&fleet.subjects(), &RequestId::new(name)?).await?)
}

/// Reads on until `n_events` token events are there, or to the end.
async fn read(answer: &mut Answer, events: &mut Results, n_events: usize) -> Result<()> {
    while answer.n_events < n_events && answer.end.is_none() {
        answer.take(events.next(wait::PATIENCE).await?.event)?;
    }
    Ok(())
}

/// Reads a job to its end.
async fn whole(fleet: &Fleet, name: &str) -> Result<Answer> {
    let (mut answer, mut events) = (Answer::default(), results(fleet, name).await?);
    read(&mut answer, &mut events, usize::MAX).await?;
    ensure!(events.next_stored().await?.is_none(), "events after the last one");
    Ok(answer)
}

fn same(found: &Answer, expected: &Answer) -> Result<()> {
    ensure!(found.tokens == expected.tokens, "{:?} instead of {:?}", found.tokens, expected.tokens);
    ensure!(found.text == expected.text, "{:?} instead of {:?}", found.text, expected.text);
    ensure!(found.reason()? == expected.reason()?);
    Ok(())
}

/// Name of the coordinator that runs the only session.
async fn busy_coordinator(fleet: &Fleet) -> Result<String> {
    let mut announcements = fleet.bus.subscribe(&fleet.subjects().fleet_all()).await?;
    let search = async {
        loop {
            let delivery = announcements.next().await.context("the broker is there")?;
            let Ok(coordinator) = delivery.decode::<CoordinatorAnnouncement>() else { continue };
            if coordinator.n_sessions == 1 {
                return Ok::<_, anyhow::Error>(coordinator.coordinator);
            }
        }
    };
    let id = tokio::time::timeout(wait::PATIENCE, search).await.context("nobody is busy")??;
    let mut members = fleet.processes.members().into_iter();
    let busy = members.find(|member| member.id.as_deref() == Some(id.as_str()));
    Ok(busy.context("no such member")?.name)
}

#[tokio::test]
async fn a_job_survives_its_coordinator() -> Result<()> {
    let mut fleet = Fleet::start(2, |spec| {
        spec.n_coordinators = 2;
        spec.settings.push(ACK_WAIT.to_owned());
    })
    .await?;
    let alone = fleet.ask(&long()).await?;
    submit(&fleet, "a", &long()).await?;
    let (mut answer, mut events) = (Answer::default(), results(&fleet, "a").await?);
    read(&mut answer, &mut events, 5).await?;
    let busy = busy_coordinator(&fleet).await?;
    fleet.processes.kill(&busy).await?;
    read(&mut answer, &mut events, usize::MAX).await?;
    same(&answer, &alone)?;
    ensure!(fleet.processes.members().len() == 3, "nobody was killed");
    // The same events again, and the same job not again.
    same(&whole(&fleet, "a").await?, &alone)?;
    ensure!(fleet.bus.submit(&fleet.subjects(), named("a", &long())?).await?.duplicate);
    Ok(())
}

#[tokio::test]
async fn a_job_survives_a_restart_of_the_broker() -> Result<()> {
    let mut fleet = Fleet::start(2, |spec| spec.settings.push(ACK_WAIT.to_owned())).await?;
    let alone = fleet.ask(&long()).await?;
    submit(&fleet, "a", &long()).await?;
    let (mut answer, mut events) = (Answer::default(), results(&fleet, "a").await?);
    read(&mut answer, &mut events, 5).await?;
    fleet.processes.broker().context("a broker")?.restart().await?;
    // The reader finds the broker by itself, and so does everybody else.
    read(&mut answer, &mut events, usize::MAX).await?;
    same(&answer, &alone)
}

#[tokio::test]
async fn jobs_survive_the_whole_fleet() -> Result<()> {
    let store = tempfile::tempdir()?;
    let start = async || {
        Fleet::start(2, |spec| {
            spec.settings.push(ACK_WAIT.to_owned());
            spec.settings.push("coordinator.jobs.max_running=1".to_owned());
            if let BrokerChoice::Private(options) = &mut spec.broker {
                options.store_dir = Some(store.path().to_owned());
            }
        })
        .await
    };
    let fleet = start().await?;
    let (alone, next) = (fleet.ask(&long()).await?, fleet.ask(&prompts::short()).await?);
    submit(&fleet, "a", &long()).await?;
    submit(&fleet, "b", &prompts::short()).await?;
    let (mut answer, mut events) = (Answer::default(), results(&fleet, "a").await?);
    read(&mut answer, &mut events, 5).await?;
    ensure!(answer.end.is_none(), "too fast: {answer:?}");
    drop((events, fleet));
    let fleet = start().await?;
    same(&whole(&fleet, "a").await?, &alone)?;
    same(&whole(&fleet, "b").await?, &next)?;
    ensure!(fleet.bus.submit(&fleet.subjects(), named("a", &long())?).await?.duplicate);
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn a_job_that_never_finds_room_is_given_up() -> Result<()> {
    let settings = ["worker.max_sessions=1", "coordinator.jobs.max_deliveries=2"];
    let fleet = Fleet::start(2, |spec| spec.settings.extend(settings.map(str::to_owned))).await?;
    let (running, mut stream) = fleet.begin(&prompts::endless(), 1).await?;
    submit(&fleet, "a", &prompts::short()).await?;
    let refused = whole(&fleet, "a").await?;
    let (class, message) = refused.failure()?;
    ensure!(class == ErrorClass::Overloaded, "{class:?}: {message}");
    ensure!(message.contains("given up after 2 tries"), "{message}");
    fleet.cancel(&running).await?;
    running.rest(&mut stream).await?;
    submit(&fleet, "b", &prompts::short()).await?;
    whole(&fleet, "b").await?.reason()?;
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn the_commands_submit_read_and_cancel() -> Result<()> {
    let fleet = Fleet::start(2, |spec| {
        spec.settings.push("coordinator.jobs.max_running=1".to_owned());
    })
    .await?;
    let url = fleet.processes.url().to_owned();
    let call = |words: &[&str]| Call::new(words.iter().copied()).args(&["--broker", &url]);
    let case = &cases()?[0];
    let tokens: Vec<String> = case.input_ids.iter().map(u32::to_string).collect();
    let prompt = ["--tokens", &tokens.join(",")];

    let first = call(&["submit", "--id", "one"]).args(&prompt).run().await?.success()?;
    ensure!(first.stdout() == "one\n", "{}", first.report());
    let again = call(&["submit", "--id", "one", "--json"]).args(&prompt).run().await?.success()?;
    ensure!(again.json()? == json!({"request_id": "one", "sequence": 1, "duplicate": true}));
    for _ in 0..2 {
        let read =
            call(&["results", "one", "--follow", "--json"]).run().await?.success()?.json()?;
        ensure!(read["state"] == "done" && read["tokens"] == json!(case.output_ids), "{read:#}");
        ensure!(read["prompt_tokens"] == case.input_ids.len(), "{read:#}");
    }
    let text = call(&["results", "one"]).run().await?.success()?;
    let waited = call(&["submit", "--wait"]).args(&prompt).run().await?.success()?;
    ensure!(text.stdout() == waited.stdout(), "{} {}", text.report(), waited.report());

    submit(&fleet, "two", &prompts::endless()).await?;
    let (mut answer, mut events) = (Answer::default(), results(&fleet, "two").await?);
    read(&mut answer, &mut events, 1).await?;
    submit(&fleet, "three", &prompts::endless()).await?;
    let unknown = call(&["results", "three"]).run().await?.failure(&["no event of three"])?;
    ensure!(unknown.code() == Some(1), "{}", unknown.report());
    let begun = call(&["results", "two", "--json"]).run().await?.failure(&[])?.json()?;
    ensure!(begun["state"] == "running", "{begun:#}");
    for name in ["three", "two"] {
        call(&["cancel", name]).run().await?.success()?;
    }
    for name in ["two", "three"] {
        let answer = whole(&fleet, name).await?;
        ensure!(answer.reason()? == FinishReason::Cancelled, "{name}: {answer:?}");
    }
    let read = call(&["results", "two"]).run().await?.failure(&["cancelled after"])?;
    ensure!(read.code() == Some(1), "{}", read.report());
    fleet.idle().await?;
    fleet.end().await
}

#[tokio::test]
async fn without_jetstream_everything_else_works_and_jobs_say_why_not() -> Result<()> {
    let broker = PlainBroker::start().await?;
    let url = broker.url().to_owned();
    let fleet = Fleet::start(1, |spec| spec.broker = BrokerChoice::Running(url.clone())).await?;
    let case = &cases()?[0];
    ensure!(fleet.ask(&prompts::of_case(case, 64)).await?.tokens == case.output_ids);
    let no_queue = ["submit", "hi", "--broker", &url];
    Call::new(no_queue).run().await?.failure(&["no stream takes", "jobs enabled"])?;
    let results = ["results", "a", "--broker", &url];
    Call::new(results).run().await?.failure(&["the broker has no JetStream"])?;
    let shards = stagebus_tests::shard_sets::get(1).await?;
    Call::new(["coordinator", "--set", "coordinator.jobs.mode=on", "--shards"])
        .arg(shards)
        .args(&["--set".to_owned(), format!("broker.url={url}")])
        .run()
        .await?
        .failure(&["durable jobs cannot be taken", "the broker has no JetStream"])?;
    fleet.end().await
}
