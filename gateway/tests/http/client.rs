//! HTTP by hand, so that a test can say exactly what goes over the wire.

use std::net::SocketAddr;

use serde_json::Value;
use tokio::io::BufReader;
use tokio::io::{AsyncBufRead, AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::bed::soon;

/// A response.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Response {
    /// A header's value.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(found, _)| found.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("{self:?}"))
    }

    /// The error in OpenAI's form; a response of another form fails the test.
    pub(crate) fn error(&self) -> Value {
        assert_eq!(self.header("content-type"), Some("application/json"), "{self:?}");
        let error = self.json()["error"].clone();
        assert!(error["message"].is_string() && error["type"].is_string(), "{self:?}");
        assert!(error["code"].is_string() && error.get("param").is_some(), "{self:?}");
        error
    }

    /// The data of the events of a stream.
    pub(crate) fn events(&self) -> Vec<&str> {
        assert_eq!(self.header("content-type"), Some("text/event-stream"), "{self:?}");
        let events = self.text().split("\n\n").filter(|event| !event.is_empty());
        events.filter_map(|event| event.strip_prefix("data: ")).collect()
    }
}

/// A connection.
pub(crate) struct Connection {
    pub(crate) stream: BufReader<TcpStream>,
}

impl Connection {
    pub(crate) async fn open(address: SocketAddr) -> Self {
        Self { stream: BufReader::new(soon(TcpStream::connect(address)).await.unwrap()) }
    }

    pub(crate) async fn write(&mut self, bytes: &[u8]) {
        soon(self.stream.get_mut().write_all(bytes)).await.unwrap();
    }

    /// Reads a whole response.
    pub(crate) async fn response(&mut self) -> Response {
        soon(read_response(&mut self.stream)).await
    }

    /// Reads a line of a head or of a chunked body, without its end.
    pub(crate) async fn line(&mut self) -> String {
        soon(read_line(&mut self.stream)).await
    }

    /// Reads until the other side closes.
    pub(crate) async fn rest(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match soon(self.stream.read_to_end(&mut bytes)).await {
            // Closed before everything that was sent was read.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
            read => drop(read.unwrap()),
        }
        bytes
    }
}

/// Sends bytes on a connection of their own and reads the response.
pub(crate) async fn send(address: SocketAddr, request: &[u8]) -> Response {
    let mut connection = Connection::open(address).await;
    connection.write(request).await;
    connection.response().await
}

pub(crate) async fn get(address: SocketAddr, path: &str) -> Response {
    send(address, &request("GET", path, &[], b"")).await
}

pub(crate) async fn post(address: SocketAddr, path: &str, body: &Value) -> Response {
    send(address, &json_request(path, body)).await
}

/// A `POST` of JSON.
pub(crate) fn json_request(path: &str, body: &Value) -> Vec<u8> {
    let content = [("Content-Type", "application/json")];
    request("POST", path, &content, body.to_string().as_bytes())
}

/// A request with these headers besides the host and the length of the body.
pub(crate) fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut text = format!("{method} {path} HTTP/1.1\r\n");
    if !headers.iter().any(|(name, _)| *name == "Host") {
        text.push_str("Host: localhost\r\n");
    }
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text.push_str(&format!("Content-Length: {}\r\n\r\n", body.len()));
    let mut bytes = text.into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

async fn read_line(stream: &mut (impl AsyncBufRead + Unpin)) -> String {
    let mut line = String::new();
    stream.read_line(&mut line).await.unwrap();
    line.trim_end_matches(['\r', '\n']).to_owned()
}

/// Reads one response: a head, and a body with a length or in chunks.
pub(crate) async fn read_response(stream: &mut (impl AsyncBufRead + Unpin)) -> Response {
    let line = read_line(stream).await;
    let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("no status in {line:?}"));
    let status = status.parse().unwrap();
    let mut response = Response { status, headers: Vec::new(), body: Vec::new() };
    loop {
        let line = read_line(stream).await;
        let Some((name, value)) = line.split_once(": ") else { break };
        response.headers.push((name.to_owned(), value.to_owned()));
    }
    if response.header("transfer-encoding") == Some("chunked") {
        loop {
            let length = usize::from_str_radix(&read_line(stream).await, 16).unwrap();
            let mut chunk = vec![0; length];
            stream.read_exact(&mut chunk).await.unwrap();
            response.body.extend(chunk);
            read_line(stream).await;
            if length == 0 {
                return response;
            }
        }
    }
    let length = response.header("content-length").map_or(0, |length| length.parse().unwrap());
    response.body = vec![0; length];
    stream.read_exact(&mut response.body).await.unwrap();
    response
}
