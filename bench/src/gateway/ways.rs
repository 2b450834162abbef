//! The two ways to ask: over the bus, and over HTTP on a connection that stays open.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde_json::{Value, json};
use stagebus_bus::BusOptions;
use stagebus_schemas::cloud_events::decode_event;
use stagebus_schemas::messages::public::{Event, PromptRequest};
use stagebus_schemas::subjects::Subjects;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

use super::scripted::{MODEL, subjects};

/// What is asked.
const PROMPT: &str = "Count the words.";

/// Longest wait for an event.
const PATIENCE: Duration = Duration::from_secs(60);

/// An answer as it was heard.
pub(super) struct Heard {
    /// When each piece of text was here.
    pub(super) arrivals: Vec<Instant>,
    /// All of it.
    pub(super) text: String,
    /// When the end was here.
    pub(super) ended: Instant,
}

impl Heard {
    /// Reads pieces, each with its time, only when the answer is over.
    fn of(pieces: impl Iterator<Item = (Instant, String)>, ended: Instant) -> Self {
        let (arrivals, texts): (Vec<_>, Vec<_>) =
            pieces.filter(|(_, text)| !text.is_empty()).unzip();
        Self { arrivals, text: texts.concat(), ended }
    }
}

/// A way to ask.
pub(super) enum Way {
    /// Over the bus.
    Bus(Bus),
    /// Over HTTP.
    Http(Http),
}

impl Way {
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Bus(_) => "bus",
            Self::Http(_) => "http",
        }
    }

    /// Asks and listens to the end.
    pub(super) async fn ask(&mut self) -> anyhow::Result<Heard> {
        match self {
            Self::Bus(bus) => bus.ask().await,
            Self::Http(http) => http.ask().await,
        }
    }
}

/// A client of the broker.
pub(super) struct Bus {
    bus: stagebus_bus::Bus,
    subjects: Subjects,
}

impl Bus {
    pub(super) async fn connect(broker: &str) -> anyhow::Result<Self> {
        let bus = stagebus_bus::Bus::connect(BusOptions {
            subscription_capacity: usize::from(u16::MAX) + 8,
            ..BusOptions::new(broker, "stagebus-bench")
        });
        Ok(Self { bus: bus.await?, subjects: subjects()? })
    }

    async fn ask(&self) -> anyhow::Result<Heard> {
        let request = PromptRequest { prompt: Some(PROMPT.to_owned()), ..PromptRequest::default() };
        let mut events = self.bus.prompt(&self.subjects.prompt(), &request, PATIENCE).await?;
        let mut all = Vec::new();
        while let Some(delivery) = events.next_raw().await? {
            all.push((Instant::now(), delivery));
        }
        let ended = Instant::now();
        let mut pieces = Vec::with_capacity(all.len());
        for (at, delivery) in all {
            if let Event::Token { text, .. } =
                decode_event(&delivery.public_headers(), &delivery.payload)?
            {
                pieces.push((at, text));
            }
        }
        Ok(Heard::of(pieces.into_iter(), ended))
    }
}

/// A client of the gateway.
pub(super) struct Http {
    stream: BufReader<TcpStream>,
    request: Vec<u8>,
    line: Vec<u8>,
}

/// A line of a streamed response.
enum Line {
    /// An event's data.
    Data(String),
    /// A comment: the request lives.
    Life,
    /// The last chunk.
    End,
}

impl Http {
    pub(super) async fn connect(gateway: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(gateway).await.context("the gateway is not there")?;
        stream.set_nodelay(true)?;
        let body = json!({ "model": MODEL, "prompt": PROMPT, "stream": true }).to_string();
        let request = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let (request, line) = (request.into_bytes(), Vec::new());
        Ok(Self { stream: BufReader::new(stream), request, line })
    }

    async fn ask(&mut self) -> anyhow::Result<Heard> {
        self.send().await?;
        let mut all = Vec::new();
        loop {
            match self.next().await? {
                Line::Data(data) => all.push((Instant::now(), data)),
                Line::Life => {}
                Line::End => break,
            }
        }
        let ended = Instant::now();
        let pieces: Vec<_> = all
            .into_iter()
            .map(|(at, data)| anyhow::Ok((at, piece(&data)?)))
            .collect::<Result<_, _>>()?;
        Ok(Heard::of(pieces.into_iter(), ended))
    }

    /// Asks and waits for the first text.
    pub(super) async fn begin(&mut self) -> anyhow::Result<()> {
        self.send().await?;
        loop {
            match self.next().await? {
                Line::Data(data) if !piece(&data)?.is_empty() => return Ok(()),
                Line::Data(_) | Line::Life => {}
                Line::End => anyhow::bail!("the answer ended before its first token"),
            }
        }
    }

    /// Waits for a sign of life.
    pub(super) async fn hear_life(&mut self) -> anyhow::Result<()> {
        match self.next().await? {
            Line::Life => Ok(()),
            Line::Data(_) | Line::End => anyhow::bail!("something else came than a sign of life"),
        }
    }

    /// Reads to the end.
    pub(super) async fn rest(&mut self) -> anyhow::Result<()> {
        while !matches!(self.next().await?, Line::End) {}
        Ok(())
    }

    async fn send(&mut self) -> anyhow::Result<()> {
        self.stream.get_mut().write_all(&self.request).await?;
        self.read_line().await?;
        anyhow::ensure!(
            self.line.starts_with(b"HTTP/1.1 200"),
            "the gateway answers {:?}",
            String::from_utf8_lossy(&self.line)
        );
        while !self.line.is_empty() {
            self.read_line().await?;
        }
        Ok(())
    }

    /// The next line that means something: sizes of chunks and empty lines do not, except the
    /// size of the last chunk.
    async fn next(&mut self) -> anyhow::Result<Line> {
        loop {
            self.read_line().await?;
            if let Some(data) = self.line.strip_prefix(b"data: ") {
                return Ok(Line::Data(String::from_utf8(data.to_vec())?));
            }
            match self.line.first() {
                Some(b':') => return Ok(Line::Life),
                Some(b'0') => {
                    self.read_line().await?;
                    return Ok(Line::End);
                }
                _ => {}
            }
        }
    }

    /// Reads a line without its end.
    async fn read_line(&mut self) -> anyhow::Result<()> {
        self.line.clear();
        let read = self.stream.read_until(b'\n', &mut self.line);
        let n = tokio::time::timeout(PATIENCE, read).await.context("the gateway is silent")??;
        anyhow::ensure!(n > 0, "the gateway closed the connection");
        while matches!(self.line.last(), Some(b'\r' | b'\n')) {
            self.line.pop();
        }
        Ok(())
    }
}

/// The text of one event.
fn piece(data: &str) -> anyhow::Result<String> {
    if data == "[DONE]" {
        return Ok(String::new());
    }
    let chunk: Value = serde_json::from_str(data).context("an event is no JSON")?;
    anyhow::ensure!(chunk["error"].is_null(), "the gateway tells an error: {data}");
    Ok(chunk["choices"][0]["text"].as_str().unwrap_or_default().to_owned())
}

/// The response to a `GET`, head and body.
pub(super) async fn get(gateway: SocketAddr, path: &str) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect(gateway).await.context("the gateway is not there")?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut response = String::new();
    stream.read_to_string(&mut response).await?;
    Ok(response)
}

#[cfg(test)]
mod tests {
    use stagebus_fleet::{BrokerOptions, LocalBroker};
    use tokio::net::TcpListener;

    use super::*;
    use crate::gateway::scripted::{self, Scripted};

    #[tokio::test]
    async fn the_bus_brings_what_the_coordinator_sends() {
        let broker = LocalBroker::start(BrokerOptions::default()).await.expect("a broker");
        let mut coordinator = Scripted::start(&broker.url()).await.expect("it subscribes");
        // On one connection, so that the broker knows the coordinator's subscription.
        let bus = Bus { bus: coordinator.bus().clone(), subjects: subjects().expect("a name") };
        let both = tokio::try_join!(coordinator.answer(3, Duration::ZERO), bus.ask());
        let (left, heard) = both.expect("an answer");
        assert_eq!((heard.text, heard.arrivals.len()), (scripted::text(3), 3));
        assert!(left.iter().zip(&heard.arrivals).all(|(left, heard)| left <= heard));
        assert!(heard.arrivals.iter().all(|at| *at <= heard.ended));
    }

    /// What a gateway may send: events in chunks of their own or several in one, comments.
    const RESPONSE: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n\
        27\r\ndata: {\"choices\":[{\"text\":\" word0\"}]}\n\n\r\n\
        b\r\n: waiting\n\n\r\n\
        56\r\ndata: {\"choices\":[{\"text\":\" word1\"}]}\n\ndata: {\"choices\":[{\"text\":\"\"}]}\n\ndata: [DONE]\n\n\r\n\
        0\r\n\r\n";

    #[tokio::test]
    async fn a_stream_over_http_is_read_to_its_end_twice_on_one_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let mut client = Http::connect(listener.local_addr().expect("bound")).await.expect("there");
        let (mut server, _) = listener.accept().await.expect("a client");
        for _ in 0..2 {
            server.write_all(RESPONSE.as_bytes()).await.expect("written");
        }
        let heard = client.ask().await.expect("an answer");
        assert_eq!((heard.text.as_str(), heard.arrivals.len()), (" word0 word1", 2));
        client.begin().await.expect("a first token");
        client.hear_life().await.expect("a comment");
        client.rest().await.expect("an end");
        drop(server);
        assert!(client.ask().await.is_err());
    }
}
