//! `encodle serve` over HTTP: responses equal the output of the commands, errors have the format of
//! their interface, and no request is lost under load.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Command, Stdio},
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use assert_cmd::cargo::cargo_bin;
use serde_json::{Value, json};

use crate::{
    cli::{ENVIRONMENT, encodle, stdout},
    support::MINILM,
};

/// The longest time that a test waits for the server.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running server. Dropping the value kills the process.
struct Server {
    process: Child,
    address: String,
}

/// A status, the header in lower case, and the body.
struct Response {
    status: u16,
    header: String,
    body: String,
}

impl Response {
    fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.body).with_context(|| self.body.clone())
    }
}

impl Server {
    /// Starts the server on a free port, and waits until it is ready.
    fn start(arguments: &[&str]) -> Result<Self> {
        Self::with_environment(arguments, &[])
    }

    fn with_environment(arguments: &[&str], environment: &[(&str, &str)]) -> Result<Self> {
        let mut process = Command::new(cargo_bin!("encodle"))
            .args(["serve", "--port", "0"])
            .args(arguments)
            .envs(ENVIRONMENT)
            .envs(environment.iter().copied())
            .stderr(Stdio::piped())
            .spawn()?;
        let log = process.stderr.take().context("standard error is piped")?;
        let mut server = Self { process, address: String::new() };
        let (sender, lines) = mpsc::channel();
        // Reads to the end, because a full pipe would block the server.
        thread::spawn(move || {
            for line in BufReader::new(log).lines() {
                sender.send(line).ok(); // fails once the receiver is dropped
            }
        });
        let (start, mut read) = (Instant::now(), String::new());
        while server.address.is_empty() {
            let line = lines.recv_timeout(PATIENCE.saturating_sub(start.elapsed()));
            let line = line.with_context(|| format!("the server prints no address: {read}"))??;
            read += &line;
            if let Some((_, address)) = line.split_once("http://") {
                server.address = address.to_string();
            }
        }
        while server.get("/health")?.status != 200 {
            if start.elapsed() > PATIENCE {
                bail!("the server is not ready");
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }

    fn get(&self, path: &str) -> Result<Response> {
        self.request(&format!("GET {path} HTTP/1.1\r\n"), b"")
    }

    fn post(&self, path: &str, body: &Value) -> Result<Response> {
        let body = body.to_string();
        self.request(
            &format!("POST {path} HTTP/1.1\r\ncontent-type: application/json\r\n"),
            body.as_bytes(),
        )
    }

    /// Sends a request and reads the response. `header` is the request line and header fields, each
    /// ending in CRLF.
    fn request(&self, header: &str, body: &[u8]) -> Result<Response> {
        let mut stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let length = body.len();
        write!(stream, "{header}host: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n")?;
        stream.write_all(body).ok(); // the server may respond before it has read the body
        let mut response = String::new();
        stream.read_to_string(&mut response)?;
        let (header, body) = response.split_once("\r\n\r\n").context("a response has a header")?;
        let status = header.get(9..12).context("a response has a status")?.parse()?;
        Ok(Response { status, header: header.to_lowercase(), body: body.to_string() })
    }

    fn vector(&self, text: &str) -> Result<Value> {
        let response = self.post("/embed", &json!({"inputs": text}))?;
        assert_eq!(response.status, 200, "{}", response.body);
        Ok(response.json()?[0].take())
    }

    /// The value of the metric whose name, labels included, is `name`.
    fn metric(&self, name: &str) -> Result<f64> {
        let text = self.get("/metrics")?.body;
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        Ok(value.with_context(|| format!("metric {name}"))?.parse()?)
    }

    fn signal(&self, name: &str) -> Result<()> {
        let id = self.process.id().to_string();
        assert!(Command::new("kill").args([name, &id]).status()?.success());
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process.kill().ok(); // it may have ended
        self.process.wait().ok();
    }
}

/// The vectors that `encodle embed` prints.
fn embedded(texts: &[&str], options: &[&str]) -> Result<Vec<Value>> {
    let arguments = [&["embed", "--format", "jsonl"], options, texts].concat();
    let lines = stdout(encodle(&arguments, b"").success());
    lines.lines().map(|line| Ok(serde_json::from_str::<Value>(line)?["embedding"].take())).collect()
}

#[test]
fn vectors_of_every_interface_are_those_of_the_command() -> Result<()> {
    let server = Server::start(&[])?;
    let texts = ["A man is eating food.", "", "né à Lyon 🦀"];
    let expected = embedded(&texts, &[])?;

    let all = json!({"model": "all-MiniLM-L6-v2", "input": texts});
    let response = server.post("/v1/embeddings", &all)?.json()?;
    let vectors = response["data"].as_array().context("data")?.iter();
    assert_eq!(vectors.map(|one| one["embedding"].clone()).collect::<Vec<_>>(), expected);
    assert_eq!(response["usage"]["total_tokens"], 8 + 2 + 6);

    assert_eq!(server.post("/embed", &json!({"inputs": texts}))?.json()?, json!(expected));
    assert_eq!(server.post("/", &json!({"inputs": texts}))?.json()?, json!(expected));

    let tokens = server.post("/tokenize", &json!({"inputs": texts}))?.json()?;
    let ids = |text: &Value| -> Vec<Value> {
        text.as_array().into_iter().flatten().map(|token| token["id"].clone()).collect()
    };
    let ids: Vec<Vec<Value>> = tokens.as_array().context("lists")?.iter().map(ids).collect();
    let of_ids = server.post("/embed", &json!({"inputs": ids}))?.json()?;
    assert_eq!(of_ids, json!(expected));

    let short = server.post("/embed", &json!({"inputs": texts[0], "dimensions": 5}))?.json()?;
    assert_eq!(short, json!(embedded(&texts[..1], &["--dimensions", "5"])?));
    Ok(())
}

#[test]
fn sparse_vectors_are_those_of_the_command() -> Result<()> {
    let model = "tests/golden/sparse/masked_lm"; // no file says that it is a sparse model
    let server = Server::start(&["--model", model, "--kind", "sparse"])?;
    let texts = ["a cat", "", "new movie"];
    let vectors = embedded(&texts, &["--model", model, "--kind", "sparse"])?;
    let pairs = |vector: &Value| -> Vec<Value> {
        let list = |field: &str| vector[field].as_array().into_iter().flatten().cloned();
        let pairs = list("indices").zip(list("values"));
        pairs.map(|(index, value)| json!({"index": index, "value": value})).collect()
    };
    let expected: Vec<Vec<Value>> = vectors.iter().map(pairs).collect();
    assert!(expected.iter().all(|pairs| !pairs.is_empty()));
    for path in ["/embed_sparse", "/"] {
        assert_eq!(server.post(path, &json!({"inputs": texts}))?.json()?, json!(expected));
    }
    let pooling = &server.get("/info")?.json()?["model_type"]["embedding"]["pooling"];
    assert_eq!(pooling, "splade");
    for (path, body, status) in
        [("/embed", json!({"inputs": "a"}), 424), ("/v1/embeddings", json!({"input": "a"}), 400)]
    {
        let refused = server.post(path, &body)?;
        assert_eq!(refused.status, status);
        assert!(refused.body.contains("(/embed_sparse)"), "{}", refused.body);
    }
    Ok(())
}

#[test]
fn tasks_return_the_objects_of_the_commands() -> Result<()> {
    let folder = |name: &str| format!("tests/golden/heads/{name}");
    let cases: [(&str, &str, &[&str], Value); 4] = [
        ("sequence", "classify", &["a bad cab"], json!({})),
        (
            "tagger",
            "tag",
            &["--aggregation", "first", "a bad cab"],
            json!({"aggregation": "first"}),
        ),
        (
            "answer",
            "answer",
            &["--question", "a bed", "--top", "3", "a bad cab"],
            json!({"question": "a bed", "top": 3}),
        ),
        ("masked_lm", "fill-mask", &["--top", "2", "a [MASK] cab"], json!({"top": 2})),
    ];
    let folders: Vec<String> = cases.iter().map(|(model, ..)| folder(model)).collect();
    let models: Vec<&str> = folders.iter().flat_map(|model| ["--model", model]).collect();
    let server = Server::start(&models)?;
    for (model, command, arguments, mut request) in cases {
        let (folder, text) = (folder(model), arguments[arguments.len() - 1]);
        let arguments = [&[command, "--model", &folder], arguments].concat();
        let expected: Value = serde_json::from_str(&stdout(encodle(&arguments, b"").success()))?;
        request["inputs"] = json!(text);
        let response = server.post(&format!("/{}", command.replace('-', "_")), &request)?;
        assert_eq!(response.json()?, json!([expected]), "{command}");
    }
    let engine = server.metric("encodle_stage_duration_seconds_count{stage=\"engine\"}")?;
    assert_eq!(engine, 4.0, "one for each task");
    let ranked = server.post("/rerank", &json!({"query": "a", "texts": ["b"]}))?;
    assert_eq!(ranked.status, 424, "{}", ranked.body); // the classifier has three labels
    Ok(())
}

/// `POST /` uses the first model, even if only a later one supports the request.
#[test]
fn the_main_route_uses_the_first_model() -> Result<()> {
    let (sequence, score) = ("tests/golden/heads/sequence", "tests/golden/heads/score");
    let server = Server::start(&["--model", sequence, "--model", score])?;
    let request = json!({"query": "a", "texts": ["b"]});
    assert_eq!(server.post("/rerank", &request)?.status, 200);
    let main = server.post("/", &request)?;
    assert_eq!(main.status, 424, "{}", main.body); // the first model has three labels
    Ok(())
}

#[test]
fn errors_have_the_status_and_the_format_of_their_interface() -> Result<()> {
    let server = Server::start(&["--max-texts", "3", "--max-body", "1"])?;
    let long = "and ".repeat(300);
    let model = "all-MiniLM-L6-v2";
    let cases = [
        ("/embed", json!({"inputs": []}), 400, "Empty"),
        ("/embed", json!({"inputs": 1}), 422, "Validation"),
        ("/embed", json!({"inputs": "a", "other": 1}), 422, "Validation"),
        ("/embed", json!({"inputs": ["a", "b", "c", "d"]}), 413, "Validation"),
        ("/embed", json!({"inputs": long, "truncate": false}), 413, "Validation"),
        ("/embed", json!({"inputs": "x".repeat(2 << 20)}), 413, "Validation"),
        ("/embed", json!({"inputs": [[40_000]]}), 422, "Tokenizer"),
        ("/embed", json!({"inputs": "a", "model": "b"}), 404, "Validation"),
        ("/embed", json!({"inputs": "a", "prompt_name": "b"}), 400, "Validation"),
        ("/embed", json!({"inputs": "a", "dimensions": 385}), 400, "Validation"),
        ("/predict", json!({"inputs": "a"}), 424, "Backend"),
        ("/none", json!({}), 404, "Validation"),
    ];
    for (path, body, status, kind) in cases {
        let response = server.post(path, &body)?;
        let json = response.json()?;
        assert_eq!((response.status, &json["error_type"]), (status, &json!(kind)), "{json}");
        assert!(json["error"].as_str().is_some_and(|error| !error.is_empty()));
    }
    assert_eq!(server.post("/embed", &json!({"inputs": ["a", "b", "c"]}))?.status, 200);
    let open_ai = [
        (json!({"model": model}), 400),
        (json!({"model": model, "input": long}), 400),
        (json!({"model": model, "input": "a", "other": 1}), 400),
        (json!({"model": model, "input": "x".repeat(2 << 20)}), 413),
    ];
    for (body, status) in open_ai {
        let response = server.post("/v1/embeddings", &body)?;
        let error = response.json()?["error"].take();
        assert_eq!((response.status, &error["code"]), (status, &json!(null)), "{error}");
        assert!(error["message"].is_string() && error["type"] == "invalid_request_error");
    }
    let cohere = server.post("/v2/rerank", &json!({"query": "a", "documents": ["b"]}))?;
    assert_eq!(cohere.status, 400);
    assert!(cohere.json()?["message"].is_string());

    let truncated = server.post("/embed", &json!({"inputs": long}))?;
    assert!(truncated.header.contains("x-truncated-texts: 1"), "{}", truncated.header);
    assert_eq!(truncated.json()?[0], embedded(&[&long], &[])?[0]);

    let header = "POST /embed HTTP/1.1\r\ncontent-type: application/json\r\nx-request-id: mine\r\n";
    let broken = server.request(header, b"{\"inputs\": \"\xff")?;
    assert_eq!(broken.status, 400);
    assert!(broken.header.contains("x-request-id: mine"), "{}", broken.header);
    assert_eq!(server.request("POST /embed HTTP/1.1\r\n", b"{}")?.status, 415);
    assert_eq!(server.get("/embed")?.status, 405);
    Ok(())
}

/// Texts of 0 to 96 words.
fn texts(count: usize) -> Vec<String> {
    let words = ["man", "eating", "bread", "snow", "quantum", "né", "movie", "tokenization"];
    let text = |i: usize| {
        let word = |j: usize| words[(i * 7 + j * j) % words.len()];
        (0..(i * i) % 97).map(word).collect::<Vec<_>>().join(" ")
    };
    (0..count).map(text).collect()
}

#[test]
fn a_text_has_the_same_bits_under_load_as_alone() -> Result<()> {
    let server = Server::start(&["--max-batch-tokens", "300"])?;
    let texts = texts(40);
    let alone: Vec<Value> = texts.iter().map(|text| server.vector(text)).collect::<Result<_>>()?;
    let check = |client: usize| -> Result<()> {
        for i in 0..texts.len() {
            // Clients start at different texts, and send different numbers of texts.
            let range: Vec<usize> =
                (i..i + client % 3 + 1).map(|j| (j * 13 + client) % 40).collect();
            let inputs: Vec<&str> = range.iter().map(|&j| texts[j].as_str()).collect();
            let response = server.post("/embed", &json!({"inputs": inputs}))?.json()?;
            let expected: Vec<&Value> = range.iter().map(|&j| &alone[j]).collect();
            assert_eq!(response, json!(expected), "client {client}, texts {range:?}");
        }
        Ok(())
    };
    thread::scope(|scope| {
        let clients: Vec<_> = (0..8).map(|client| scope.spawn(move || check(client))).collect();
        clients.into_iter().try_for_each(|client| client.join().expect("no panic"))
    })?;
    // If requests did not share batches, there would be at least one batch per request.
    let batches = server.metric("encodle_batch_tokens_count")?;
    assert!(batches < (8 * 40) as f64, "{batches} batches");
    Ok(())
}

/// Sets a flag when it is dropped.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `during` while clients send requests, and checks the responses. Returns the number of
/// connections that were refused.
fn under_load(
    server: &Server,
    clients: usize,
    during: impl FnOnce() -> Result<()>,
) -> Result<usize> {
    let stop = AtomicBool::new(false);
    let answered = AtomicUsize::new(0);
    let body = json!({"inputs": texts(5)});
    let expected = server.post("/embed", &body)?.body;
    let client = || {
        let mut refused = 0;
        while !stop.load(Ordering::Relaxed) {
            match server.post("/embed", &body) {
                Ok(response) => {
                    assert_eq!((response.status, &response.body), (200, &expected));
                    answered.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) => {
                    let error =
                        error.downcast::<std::io::Error>().expect("an error of the network");
                    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{error}");
                    refused += 1;
                    thread::sleep(Duration::from_millis(5));
                }
            }
        }
        refused
    };
    thread::scope(|scope| {
        let clients: Vec<_> = (0..clients).map(|_| scope.spawn(client)).collect();
        let start = Instant::now();
        while answered.load(Ordering::Relaxed) < 10 && start.elapsed() < PATIENCE {
            thread::sleep(Duration::from_millis(5));
        }
        let result = {
            let _stop = SetOnDrop(&stop); // also if `during` panics
            during()
        };
        let refused = clients.into_iter().map(|client| client.join().expect("no panic")).sum();
        result.map(|()| refused)
    })
}

#[test]
fn sigterm_loses_no_request() -> Result<()> {
    let mut server = Server::start(&[])?;
    under_load(&server, 4, || {
        server.signal("-TERM")?;
        let start = Instant::now();
        // `under_load` asserts that every connection that failed was refused.
        while server.get("/live").is_ok() && start.elapsed() < PATIENCE {
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    })?;
    let start = Instant::now();
    let status = loop {
        match server.process.try_wait()? {
            Some(status) => break status,
            None if start.elapsed() > PATIENCE => bail!("the server does not end"),
            None => thread::sleep(Duration::from_millis(20)),
        }
    };
    assert!(status.success());
    Ok(())
}

#[test]
fn models_are_loaded_again_without_a_failed_request() -> Result<()> {
    let server = Server::start(&["--model", MINILM])?;
    let loaded = || server.metric("encodle_models_loaded_timestamp_seconds");
    let first = loaded()?;
    let refused = under_load(&server, 4, || {
        let start = Instant::now();
        while loaded()? <= first && start.elapsed() < PATIENCE {
            server.signal("-HUP")?;
            thread::sleep(Duration::from_millis(300));
        }
        Ok(())
    })?;
    assert_eq!(refused, 0);
    assert!(loaded()? > first);
    Ok(())
}

#[test]
fn requests_of_disconnected_clients_are_not_computed() -> Result<()> {
    let server = Server::start(&[])?;
    let texts: Vec<String> = (0..2000).map(|i| format!("{i} {}", "word ".repeat(200))).collect();
    let body = json!({"inputs": texts}).to_string();
    let mut stream = TcpStream::connect(&server.address)?;
    write!(
        stream,
        "POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let wait_until_queue = |is_filled: bool| -> Result<()> {
        let start = Instant::now();
        while (server.metric("encodle_queue_tokens")? > 0.0) != is_filled {
            if start.elapsed() > PATIENCE {
                bail!("the queue is not {}", if is_filled { "filled" } else { "empty" });
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    };
    wait_until_queue(true)?;
    drop(stream);
    wait_until_queue(false)?;
    let computed = server.metric("encodle_tokens_total{model=\"all-MiniLM-L6-v2\"}")?;
    assert!(computed < 200_000.0, "{computed} of 404,000 tokens were computed");
    Ok(())
}

#[test]
fn api_keys_are_required_except_for_pages_health_and_metrics() -> Result<()> {
    let server = Server::with_environment(&[], &[("ENCODLE_API_KEYS", "one,two")])?;
    for path in ["/", "/docs", "/openapi.json", "/health", "/ping", "/live", "/metrics"] {
        assert_eq!(server.get(path)?.status, 200, "{path}");
    }
    let with = |key: &str| server.request(&format!("GET /info HTTP/1.1\r\n{key}"), b"");
    assert_eq!(with("")?.status, 401);
    assert_eq!(with("authorization: Bearer three\r\n")?.status, 401);
    assert_eq!(with("authorization: Bearer two\r\n")?.status, 200);
    assert_eq!(server.post("/", &json!({"inputs": "a"}))?.status, 401);
    Ok(())
}

#[test]
fn serve_refuses_wrong_options_and_names_them() {
    let cases: [(&[&str], &str); 4] = [
        (&["--dtype", "x=int8"], "--dtype names the unknown model \"x\""),
        (&["--model", "a=tests/golden/heads/texts.safetensors"], "model \"a\" cannot be served"),
        (&["--api-key-file", "/dev/null"], "/dev/null has no API keys"),
        (&["--timeout", "0"], "expected a number of seconds"),
    ];
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "\u{feff}one\nschl\u{fc}ssel\n").unwrap();
    let keys: [&str; 2] = ["--api-key-file", file.path().to_str().unwrap()];
    let wrong_key = (&keys[..], "an API key of 9 characters contains '\u{fc}'");
    for (arguments, message) in cases.into_iter().chain([wrong_key]) {
        let arguments = [&["serve", "--port", "0"], arguments].concat();
        let error = encodle(&arguments, b"").failure().get_output().stderr.clone();
        let error = String::from_utf8(error).unwrap();
        let last = error.lines().last().unwrap_or_default(); // after the log
        assert!(last.contains(message), "{arguments:?}: {error}");
    }
}
