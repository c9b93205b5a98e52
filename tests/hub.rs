//! Downloads from the hub, tested with local servers that imitate the hub and its storage.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
};

use assert_cmd::{Command, cargo::cargo_bin_cmd};
use encoder::{Error, Hub, HubError, LoadOptions, ModelFiles, TextClassifier};
use sha1::{Digest, Sha1};
use sha2::Sha256;
use tempfile::TempDir;

use crate::{cli::ENVIRONMENT, support::golden};

type Result<T = ()> = anyhow::Result<T>;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const NEWER: &str = "89abcdef0123456789abcdef0123456789abcdef";
const WEIGHTS: &str = "model.safetensors";

/// A request that a server received.
#[derive(Clone, Debug)]
struct Request {
    method: String,
    path: String,
    headers: BTreeMap<String, String>,
}

/// A server's response.
#[derive(Default)]
struct Response {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    /// Number of bytes of the body after which the connection is closed.
    cut: Option<usize>,
}

impl Response {
    fn new(status: u16, headers: &[(&'static str, &str)]) -> Self {
        let headers = headers.iter().map(|&(name, value)| (name, value.to_string())).collect();
        Self { status, headers, ..Self::default() }
    }

    /// A file, or the part of it that the request's `Range` header selects.
    fn file(request: &Request, bytes: &[u8]) -> Self {
        let range = request.headers.get("range").and_then(|range| range.strip_prefix("bytes="));
        let start: usize = range.map_or(0, |range| range.trim_end_matches('-').parse().unwrap());
        let content_range = format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len());
        let headers = vec![("Content-Range", content_range)];
        let status = if start > 0 { 206 } else { 200 };
        Self { status, headers, body: bytes[start..].to_vec(), cut: None }
    }
}

/// A server on the loopback interface, with a log of its requests.
struct Server {
    url: String,
    log: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    fn start(response: impl Fn(&Request) -> Response + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let log = Arc::new(Mutex::new(vec![]));
        let (response, requests) = (Arc::new(response), log.clone());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (response, requests) = (response.clone(), requests.clone());
                thread::spawn(move || serve(stream.unwrap(), &requests, &*response));
            }
        });
        Self { url, log }
    }

    fn requests(&self) -> Vec<Request> {
        self.log.lock().unwrap().clone()
    }
}

/// Serves one request, and closes the connection.
fn serve(
    mut stream: TcpStream,
    log: &Mutex<Vec<Request>>,
    response: &dyn Fn(&Request) -> Response,
) -> Option<()> {
    let mut lines = BufReader::new(stream.try_clone().ok()?).lines().map_while(|line| line.ok());
    let first = lines.next()?;
    let mut words = first.split(' ').map(String::from);
    let (method, path) = (words.next()?, words.next()?);
    let headers = lines.take_while(|line| !line.is_empty()).filter_map(|line| {
        let (name, value) = line.split_once(": ")?;
        Some((name.to_lowercase(), value.to_string()))
    });
    let request = Request { method, path, headers: headers.collect() };
    log.lock().unwrap().push(request.clone());
    let Response { status, headers, body, cut } = response(&request);
    let length = body.len();
    write!(stream, "HTTP/1.1 {status} x\r\nConnection: close\r\nContent-Length: {length}\r\n")
        .ok()?;
    for (name, value) in headers {
        write!(stream, "{name}: {value}\r\n").ok()?;
    }
    write!(stream, "\r\n").ok()?;
    if request.method != "HEAD" {
        stream.write_all(&body[..cut.unwrap_or(length).min(length)]).ok()?;
    }
    stream.flush().ok()
}

/// The result of downloading weights with a fault of the hub or of its storage, for the conformance
/// table.
pub fn outcome(fault: &str) -> String {
    let fault = fault.to_string();
    let storage_fault = fault.clone();
    let fixture = Fixture::new(
        move |request, store_url| match fault.as_str() {
            "401" => Response::new(401, &[("X-Error-Code", "RepoNotFound")]),
            "403" => Response::new(403, &[("X-Error-Code", "GatedRepo")]),
            "no revision" => Response::new(404, &[("X-Error-Code", "RevisionNotFound")]),
            "503" => Response::new(503, &[]),
            _ => hub(request, store_url),
        },
        move |request| {
            let mut response = store(request);
            match storage_fault.as_str() {
                "cut" if response.status == 200 => response.cut = Some(10_000),
                "changed" => response.body[700] ^= 1,
                "longer" => response.body.push(0),
                _ => {}
            }
            response
        },
    );
    match fixture.weights() {
        Ok(bytes) if bytes == model_file(WEIGHTS).unwrap() => {
            format!("the file, in {} request(s) to the storage", fixture.store.requests().len())
        }
        Ok(_) => "other bytes".to_string(),
        Err(error) => format!("error: {}", error.to_string().replace(&fixture.hub.url, "<hub>")),
    }
}

fn hex(hash: impl AsRef<[u8]>) -> String {
    hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn model_file(name: &str) -> Option<Vec<u8>> {
    fs::read(golden("heads/score").join(name)).ok()
}

/// The hub's response for a model of any name, with the files of `heads/score`. `store_url` is the
/// URL of the storage that has the weights.
fn hub(request: &Request, store_url: &str) -> Response {
    let Some((_, file)) = request.path.split_once("/resolve/").and_then(|(_, p)| p.split_once('/'))
    else {
        return Response::new(404, &[("X-Error-Code", "RepoNotFound")]);
    };
    let commit = ("X-Repo-Commit", COMMIT);
    let Some(bytes) = model_file(file) else {
        return Response::new(404, &[("X-Error-Code", "EntryNotFound"), commit]);
    };
    if file == WEIGHTS {
        let (etag, size) =
            (format!("\"{}\"", hex(Sha256::digest(&bytes))), bytes.len().to_string());
        let location = format!("{store_url}/{file}?signature=1");
        let linked =
            [("X-Linked-Etag", &etag[..]), ("X-Linked-Size", &size), ("Location", &location)];
        return Response::new(302, &[&linked[..], &[commit]].concat());
    }
    let etag = hex(Sha1::new_with_prefix(format!("blob {}\0", bytes.len()))
        .chain_update(&bytes)
        .finalize());
    let mut response = Response::file(request, &bytes);
    response.headers.extend([("ETag", format!("W/\"{etag}\"")), ("X-Repo-Commit", COMMIT.into())]);
    response
}

/// The response of a correct storage for large files.
fn store(request: &Request) -> Response {
    Response::file(request, &model_file(WEIGHTS).unwrap())
}

/// A hub, its storage, and an empty cache.
struct Fixture {
    hub: Server,
    store: Server,
    cache: TempDir,
}

impl Fixture {
    fn new(
        hub_response: impl Fn(&Request, &str) -> Response + Send + Sync + 'static,
        store_response: impl Fn(&Request) -> Response + Send + Sync + 'static,
    ) -> Self {
        let store = Server::start(store_response);
        let store_url = store.url.clone();
        let hub = Server::start(move |request| hub_response(request, &store_url));
        Self { hub, store, cache: tempfile::tempdir().unwrap() }
    }

    fn hub(&self) -> Hub {
        Hub::new(self.cache.path().join("hub")).with_endpoint(&self.hub.url)
    }

    fn files(&self) -> ModelFiles {
        self.hub().model("org/name").unwrap()
    }

    fn folder(&self) -> PathBuf {
        self.cache.path().join("hub/models--org--name")
    }

    /// Downloads the weights.
    fn weights(&self) -> encoder::Result<Vec<u8>> {
        self.files().need(WEIGHTS, "weights").map(|bytes| bytes.into_owned())
    }

    fn error(&self) -> String {
        let Err(error) = self.weights() else { panic!("the download succeeded") };
        error.to_string().replace(&self.hub.url, "<hub>")
    }

    /// The file names in the `blobs` folder.
    fn blobs(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder().join("blobs")).into_iter().flatten();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

#[test]
fn a_file_of_unknown_length_is_refused_and_the_error_omits_the_password() {
    let without_length = |request: &Request, store_url: &str| {
        let mut response = hub(request, store_url);
        response.headers.retain(|(name, _)| *name != "X-Linked-Size");
        response
    };
    let fixture = Fixture::new(without_length, store);
    let endpoint = fixture.hub.url.replace("://", "://user:secret@");
    let hub = fixture.hub().with_endpoint(&endpoint);
    assert!(!format!("{hub:?}").contains("secret"));
    let error = hub.model("org/name").and_then(|files| files.need(WEIGHTS, "weights"));
    let error = error.unwrap_err().to_string();
    let expected = "cannot be fetched: the response has no valid X-Linked-Size or Content-Length";
    assert!(error.starts_with(&fixture.hub.url) && error.contains(expected), "{error}");
    assert_eq!(fixture.store.requests().len(), 0);
    assert_eq!(fixture.blobs(), [""; 0]);
    let other = fixture.hub().with_endpoint("ftp://user:secret@host").model("org/name");
    let other = other.map(|files| files.need(WEIGHTS, "weights"));
    let other = other.and_then(|read| read).unwrap_err().to_string();
    assert!(other.contains("ftp://host") && !other.contains("secret"), "{other}");
}

fn scores(files: &ModelFiles) -> Result<Vec<f32>> {
    let model = TextClassifier::from_files(files, &LoadOptions::default())?;
    Ok(model.rerank("bad cab", &["a cab", "fade"])?)
}

#[test]
fn a_model_is_downloaded_once_and_then_read_from_the_cache() -> Result {
    let fixture = Fixture::new(hub, store);
    let expected = scores(&ModelFiles::dir(golden("heads/score"))?)?;
    assert_eq!(scores(&fixture.files())?, expected);
    let requests_before = fixture.hub.requests().len();
    assert_eq!(scores(&fixture.files())?, expected);
    assert_eq!(scores(&fixture.hub().model(&format!("org/name@{COMMIT}"))?)?, expected);
    assert_eq!(fixture.hub.requests().len(), requests_before, "{:?}", fixture.hub.requests());
    assert_eq!(fixture.store.requests().len(), 1);
    let unreachable = fixture.hub().with_endpoint("http://127.0.0.1:1").offline(true);
    assert_eq!(scores(&unreachable.model("org/name")?)?, expected);

    // The cache layout is that of Python's huggingface_hub.
    let folder = fixture.folder();
    assert_eq!(fs::read_to_string(folder.join("refs/main"))?, COMMIT);
    let etag = hex(Sha256::digest(model_file(WEIGHTS).unwrap()));
    assert!(folder.join("blobs").join(&etag).is_file());
    #[cfg(unix)]
    assert_eq!(
        fs::read_link(folder.join("snapshots").join(COMMIT).join(WEIGHTS))?,
        Path::new("../../blobs").join(etag)
    );
    assert!(folder.join(".no_exist").join(COMMIT).join("tokenizer.json").is_file());
    Ok(())
}

#[test]
fn requests_contain_the_revision_and_the_folder() -> Result {
    let fixture = Fixture::new(hub, store);
    let files = fixture.hub().model("org/name@refs/pr/1")?;
    files.need("config.json", "sizes")?;
    files.need("2 x/config.json", "sizes").unwrap_err();
    let paths: Vec<String> = fixture.hub.requests().into_iter().map(|r| r.path).collect();
    assert_eq!(paths[0], "/org/name/resolve/refs%2Fpr%2F1/config.json");
    assert_eq!(paths[2], format!("/org/name/resolve/{COMMIT}/2%20x/config.json"));
    assert_eq!(fs::read_to_string(fixture.folder().join("refs/refs/pr/1"))?, COMMIT);
    Ok(())
}

#[test]
fn the_token_is_sent_only_to_the_hub() -> Result {
    let fixture = Fixture::new(hub, store);
    let files = fixture.hub().with_token("secret").model("org/name")?;
    files.need(WEIGHTS, "weights")?;
    files.need("config.json", "sizes")?;
    for request in fixture.hub.requests() {
        assert_eq!(request.headers.get("authorization").map(String::as_str), Some("Bearer secret"));
    }
    let to_store = fixture.store.requests();
    assert!(!to_store.is_empty());
    assert!(to_store.iter().all(|r| !r.headers.contains_key("authorization")), "{to_store:?}");
    Ok(())
}

#[test]
fn a_download_resumes_after_a_closed_connection() -> Result {
    let fixture = Fixture::new(hub, |request| {
        let cut = (!request.headers.contains_key("range")).then_some(10_000);
        Response { cut, ..store(request) }
    });
    assert_eq!(fixture.weights()?, model_file(WEIGHTS).unwrap());
    let ranges: Vec<Option<String>> =
        fixture.store.requests().iter().map(|r| r.headers.get("range").cloned()).collect();
    assert_eq!(ranges, [None, Some("bytes=10000-".to_string())]);
    Ok(())
}

#[test]
fn a_partial_file_of_an_earlier_run_is_resumed() -> Result {
    let fixture = Fixture::new(hub, store);
    let bytes = model_file(WEIGHTS).unwrap();
    let etag = hex(Sha256::digest(&bytes));
    fs::create_dir_all(fixture.folder().join("blobs"))?;
    let partial = fixture.folder().join(format!("blobs/{etag}.incomplete"));
    fs::write(&partial, &bytes[..5000])?;
    assert_eq!(fixture.weights()?, bytes);
    assert_eq!(fixture.store.requests()[0].headers["range"], "bytes=5000-");
    assert_eq!(fixture.blobs(), [etag]);
    Ok(())
}

/// A storage that ignores the `Range` header, and one that sends another range than requested.
#[test]
fn a_download_that_cannot_be_resumed_starts_again() -> Result {
    let without_ranges = |request: &Request| {
        let request = Request { headers: BTreeMap::new(), ..request.clone() };
        store(&request)
    };
    let another_range = |request: &Request| {
        let mut response = store(request);
        if response.status == 206 {
            response.headers = vec![("Content-Range", "bytes 0-9/10".to_string())];
        }
        response
    };
    let bytes = model_file(WEIGHTS).unwrap();
    for fixture in [Fixture::new(hub, without_ranges), Fixture::new(hub, another_range)] {
        fs::create_dir_all(fixture.folder().join("blobs"))?;
        let etag = hex(Sha256::digest(&bytes));
        fs::write(fixture.folder().join(format!("blobs/{etag}.incomplete")), &bytes[1..300])?;
        assert_eq!(fixture.weights()?, bytes);
    }
    Ok(())
}

#[test]
fn wrong_bytes_are_never_accepted() -> Result {
    let changed = Fixture::new(hub, |request| {
        let mut response = store(request);
        response.body[700] ^= 1;
        response
    });
    let error = changed.error();
    let url = format!("<hub>/org/name/resolve/{COMMIT}/{WEIGHTS}");
    assert!(error.starts_with(&format!("{url} failed verification: expected SHA-256 ")), "{error}");
    assert_eq!(changed.blobs(), [""; 0]);

    let longer = Fixture::new(hub, |request| {
        let mut response = store(request);
        response.body.extend([0; 100_000]);
        response
    });
    let error = longer.error();
    let size = model_file(WEIGHTS).unwrap().len();
    let expected = format!(": expected {size} bytes, got {} bytes; ", size + 1);
    assert!(error.contains(&expected), "{error}");
    assert_eq!(longer.blobs(), [""; 0]);

    let shorter = Fixture::new(hub, |request| {
        if request.headers.contains_key("range") {
            Response::new(416, &[])
        } else {
            Response::file(request, &model_file(WEIGHTS).unwrap()[..100])
        }
    });
    let error = shorter.error();
    assert!(error.contains(" cannot be fetched: "), "{error}");
    assert!(!has_weights(&shorter));

    // A small file is verified by the SHA-1 of its git blob.
    let small = Fixture::new(
        |request, store_url| {
            let mut response = hub(request, store_url);
            response.body.iter_mut().take(1).for_each(|byte| *byte = b' ');
            response
        },
        store,
    );
    let error = small.files().need("config.json", "sizes").unwrap_err().to_string();
    assert!(error.contains("expected git blob SHA-1 "), "{error}");
    Ok(())
}

fn has_weights(fixture: &Fixture) -> bool {
    fixture.blobs().iter().any(|name| !name.ends_with(".incomplete"))
}

#[test]
fn errors_of_the_hub_are_reported() -> Result {
    for (response, expected) in [
        (
            (401, vec![("X-Error-Code", "RepoNotFound")]),
            "model org/name not found at <hub>: expected a public model, a model that the token in \
             HF_TOKEN may read, or the path of a folder or file",
        ),
        (
            (403, vec![("X-Error-Code", "GatedRepo")]),
            "access to model org/name is restricted: expected a token with access in HF_TOKEN; \
             request access at <hub>/org/name",
        ),
        (
            (404, vec![("X-Error-Code", "RevisionNotFound")]),
            "model org/name has no revision \"main\": expected a branch, a tag or a commit",
        ),
        (
            (404, vec![]),
            "model org/name not found at <hub>: expected a public model, a model that the token in \
             HF_TOKEN may read, or the path of a folder or file",
        ),
        (
            (418, vec![]),
            "<hub>/org/name/resolve/main/model.safetensors cannot be fetched: the server \
             responded with status 418",
        ),
        (
            (200, vec![("ETag", "\"x\"")]),
            "<hub>/org/name/resolve/main/model.safetensors cannot be fetched: the response \
             has no valid ETag or X-Repo-Commit header",
        ),
        // A commit or an ETag with path separators must not become part of a path.
        (
            (200, vec![("ETag", "\"x\""), ("X-Repo-Commit", "../../..")]),
            "<hub>/org/name/resolve/main/model.safetensors cannot be fetched: the response \
             has no valid ETag or X-Repo-Commit header",
        ),
        (
            (200, vec![("ETag", "\"../../x\""), ("X-Repo-Commit", COMMIT)]),
            "<hub>/org/name/resolve/main/model.safetensors cannot be fetched: the response \
             has no valid ETag or X-Repo-Commit header",
        ),
    ] {
        let fixture = Fixture::new(move |_, _| Response::new(response.0, &response.1), store);
        assert_eq!(fixture.error(), expected);
    }
    Ok(())
}

#[test]
fn requests_to_a_busy_hub_are_retried() -> Result {
    let tries = Mutex::new(0);
    let fixture = Fixture::new(
        move |request, store_url| {
            let mut tries = tries.lock().unwrap();
            *tries += 1;
            if *tries % 3 != 0 { Response::new(503, &[]) } else { hub(request, store_url) }
        },
        store,
    );
    assert_eq!(fixture.weights()?, model_file(WEIGHTS).unwrap());
    let busy = Fixture::new(|_, _| Response::new(503, &[]), store);
    assert!(busy.error().contains("status 503"), "{}", busy.error());
    Ok(())
}

/// A renamed model, models renamed 10 and 11 times, and a redirect loop.
#[test]
fn redirects_are_followed() -> Result {
    let renamed = |request: &Request, store_url: &str| match request.path.strip_prefix("/org/name/")
    {
        Some(rest) => Response::new(307, &[("Location", &format!("/new/name/{rest}"))]),
        None => hub(request, store_url),
    };
    let fixture = Fixture::new(renamed, store);
    let files = fixture.hub().with_token("secret").model("org/name")?;
    assert_eq!(files.need("vocab.txt", "words")?, model_file("vocab.txt").unwrap());
    let requests = fixture.hub.requests();
    assert!(requests.iter().all(|request| request.headers.contains_key("authorization")));
    // The path of a model that was renamed n times is /n/name.
    let chain = |request: &Request, store_url: &str| {
        let (_, rest) = request.path.split_once("/name/").expect("a file of the model");
        match request.path.split('/').nth(1).and_then(|n| n.parse::<u32>().ok()) {
            Some(0) | None => hub(request, store_url),
            Some(n) => Response::new(307, &[("Location", &format!("/{}/name/{rest}", n - 1))]),
        }
    };
    let chain = Fixture::new(chain, store);
    chain.hub().model("10/name")?.need("vocab.txt", "words")?;
    let error = chain.hub().model("11/name")?.need("vocab.txt", "words").unwrap_err().to_string();
    assert!(error.contains("redirected more than 10 times"), "{error}");
    let cycle = Fixture::new(|r, _| Response::new(307, &[("Location", &r.path)]), store);
    assert!(cycle.error().contains("redirected more than 10 times"), "{}", cycle.error());
    Ok(())
}

#[test]
fn offline_mode_uses_only_the_cache() -> Result {
    let fixture = Fixture::new(hub, store);
    let files = fixture.hub().offline(true).model("org/name")?;
    let error = files.need("config.json", "sizes").unwrap_err();
    assert!(matches!(error, Error::Hub(HubError::Offline { .. })), "{error}");
    fixture.files().need("config.json", "sizes")?;
    let requests_before = fixture.hub.requests().len();
    let files = fixture.hub().offline(true).model("org/name")?;
    files.need("config.json", "sizes")?;
    let error = files.need("vocab.txt", "word pieces").unwrap_err().to_string();
    assert!(error.starts_with("vocab.txt of model org/name is not in the cache "), "{error}");
    assert_eq!(fixture.hub.requests().len(), requests_before);
    Ok(())
}

/// A cache that Python filled lacks the markers of files that the model does not have.
#[test]
fn a_complete_cache_suffices_when_the_hub_is_unreachable() -> Result {
    let fixture = Fixture::new(hub, store);
    let expected = scores(&fixture.files())?;
    fs::remove_dir_all(fixture.folder().join(".no_exist"))?;
    let unreachable = fixture.hub().with_endpoint("http://127.0.0.1:1");
    assert_eq!(scores(&unreachable.model("org/name")?)?, expected);
    fs::remove_file(fixture.folder().join("snapshots").join(COMMIT).join(WEIGHTS))?;
    let error = scores(&unreachable.model("org/name")?).unwrap_err().to_string();
    assert!(
        error.starts_with("model.safetensors of model org/name is not in the cache "),
        "{error}"
    );
    let cause = "and the hub cannot be reached: the request to 127.0.0.1:1 failed: ";
    assert!(error.contains(cause), "{error}");
    Ok(())
}

/// The hub, the proxy or the name that fails, in place of a hub that can be reached.
#[cfg(target_os = "linux")]
#[test]
fn an_unreachable_hub_is_an_error_that_names_the_host_or_the_proxy_and_the_cause() -> Result {
    let fixture = Fixture::new(hub, store);
    let refusing = Server::start(|_| Response::new(407, &[]));
    let label = "a".repeat(64); // longer than the DNS permits
    let long_name = format!("http://{label}.org");
    let (closed, no_proxy) = ("http://user:secret@127.0.0.1:1", "127.0.0.1");
    let through = |proxy: &str| {
        let proxy = proxy.replace("user:secret@", "");
        format!(
            "the request through the proxy {proxy} (ALL_PROXY, HTTPS_PROXY or HTTP_PROXY) failed: "
        )
    };
    let refused = "Connection refused (os error 111)";
    for (endpoint, variables, expected) in [
        ("http://127.0.0.1:1", vec![], format!("the request to 127.0.0.1:1 failed: {refused}")),
        (
            &long_name,
            vec![],
            format!("the request to {label}.org failed: failed to lookup address information"),
        ),
        (&fixture.hub.url, vec![("HTTPS_PROXY", closed)], through(closed) + refused),
        (
            &fixture.hub.url,
            vec![("ALL_PROXY", &refusing.url)],
            through(&refusing.url) + "proxy server responded 407",
        ),
        (
            "http://127.0.0.1:1",
            vec![("HTTP_PROXY", closed), ("NO_PROXY", no_proxy)],
            format!("the request to 127.0.0.1:1 failed: {refused}"),
        ),
        (
            &fixture.hub.url,
            vec![("ALL_PROXY", "socks5://user:secret@127.0.0.1:1")],
            "the proxy socks5://127.0.0.1:1 is not supported: expected http:// or https:// in \
             ALL_PROXY, HTTPS_PROXY or HTTP_PROXY"
                .to_string(),
        ),
    ] {
        let mut command = encodle(&fixture);
        command.args(["embed", "--model", "org/name", "a"]).env("HF_ENDPOINT", endpoint);
        let error = command.envs(variables).assert().code(1).get_output().stderr.clone();
        let error = String::from_utf8(error)?;
        let url = format!("{endpoint}/org/name/resolve/main/modules.json cannot be fetched: ");
        assert!(error.starts_with(&format!("encodle: {url}{expected}")), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    Ok(())
}

/// Without the file, the model would be loaded with other settings.
#[test]
fn a_failed_request_for_an_optional_file_is_an_error_once_the_hub_has_answered() -> Result {
    let fixture = Fixture::new(
        |request, store_url| {
            if request.path.ends_with("/tokenizer_config.json") {
                Response::new(503, &[])
            } else {
                hub(request, store_url)
            }
        },
        store,
    );
    let error = scores(&fixture.files()).unwrap_err().to_string();
    assert!(
        error.contains("/tokenizer_config.json cannot be fetched: ") && error.contains("503"),
        "{error}"
    );
    Ok(())
}

#[test]
fn an_invalid_endpoint_or_token_is_an_error_that_names_it() -> Result {
    let fixture = Fixture::new(hub, store);
    let error = fixture.hub().with_endpoint("127.0.0.1:80").model("org/name").unwrap_err();
    assert!(error.to_string().contains("\"127.0.0.1:80\""), "{error}");
    for token in ["a b", "hf_\n", "hf_ä"] {
        let error = fixture.hub().with_token(token).model("org/name").unwrap_err();
        assert!(error.to_string().contains("HF_TOKEN"), "{token:?}: {error}");
        fixture.hub().with_token(token).offline(true).model("org/name")?;
    }
    Ok(())
}

#[test]
fn a_response_for_another_commit_is_an_error() -> Result {
    let fixture = Fixture::new(hub, store);
    let files = fixture.hub().model(&format!("org/name@{NEWER}"))?;
    let error = files.need("config.json", "sizes").unwrap_err().to_string();
    let expected =
        format!("cannot be fetched: the response is for commit {COMMIT}: expected {NEWER}");
    assert!(error.ends_with(&expected), "{error}");
    assert_eq!(fixture.hub.requests().len(), 1);
    Ok(())
}

/// The branch moves to a newer commit while the model is being loaded.
#[test]
fn all_files_come_from_one_commit() -> Result {
    let fixture = Fixture::new(hub, store);
    let files = fixture.files();
    files.need("config.json", "sizes")?;
    fs::write(fixture.folder().join("refs/main"), NEWER)?;
    files.need("vocab.txt", "word pieces")?;
    let last = fixture.hub.requests().pop().unwrap();
    assert_eq!(last.path, format!("/org/name/resolve/{COMMIT}/vocab.txt"));
    Ok(())
}

#[test]
fn a_wrong_partial_file_is_downloaded_again() -> Result {
    let fixture = Fixture::new(hub, store);
    let bytes = model_file(WEIGHTS).unwrap();
    let etag = hex(Sha256::digest(&bytes));
    fs::create_dir_all(fixture.folder().join("blobs"))?;
    for wrong in [vec![7; 300], vec![7; bytes.len()], vec![7; bytes.len() + 1]] {
        fs::write(fixture.folder().join(format!("blobs/{etag}.incomplete")), wrong)?;
        assert_eq!(fixture.weights()?, bytes);
        fs::remove_dir_all(fixture.folder().join("snapshots"))?;
        fs::remove_file(fixture.folder().join(format!("blobs/{etag}")))?;
    }
    Ok(())
}

#[test]
fn debug_output_hides_the_token() {
    let hub = Hub::new("nowhere").with_token("secret");
    assert!(!format!("{hub:?} {:?}", hub.model("org/name")).contains("secret"));
}

/// Two concurrent reads of a file that is not cached, one of them within an asynchronous runtime.
#[test]
fn two_concurrent_readers_download_a_file_once() -> Result {
    let fixture = Fixture::new(hub, store);
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    thread::scope(|scope| {
        let other = scope.spawn(|| fixture.weights().unwrap().len());
        let own = runtime.block_on(async { fixture.weights().unwrap().len() });
        assert_eq!(other.join().unwrap(), own);
    });
    assert_eq!(fixture.store.requests().len(), 1, "the file was downloaded twice");
    Ok(())
}

#[test]
fn progress_is_reported() -> Result {
    let fixture = Fixture::new(hub, store);
    let seen = Arc::new(Mutex::new(vec![]));
    let recorder = seen.clone();
    let hub = fixture.hub().with_progress(move |download| {
        let file = download.file.to_string();
        recorder.lock().unwrap().push((file, download.bytes, download.total));
    });
    hub.model("org/name")?.need(WEIGHTS, "weights")?;
    let size = model_file(WEIGHTS).unwrap().len() as u64;
    let seen = seen.lock().unwrap();
    assert_eq!(seen.last(), Some(&(WEIGHTS.to_string(), size, size)));
    Ok(())
}

/// The binary with the environment variables of the hub.
fn encodle(fixture: &Fixture) -> Command {
    let mut command = cargo_bin_cmd!("encodle");
    command
        .envs(ENVIRONMENT)
        .env("HF_ENDPOINT", &fixture.hub.url)
        .env("HF_HOME", fixture.cache.path())
        .env("HF_HUB_OFFLINE", "0");
    for name in [
        "HF_TOKEN",
        "HF_TOKEN_PATH",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "TRANSFORMERS_OFFLINE",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN",
    ] {
        command.env_remove(name);
    }
    for name in ["ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY"] {
        command.env_remove(name).env_remove(name.to_lowercase());
    }
    command
}

#[test]
fn the_token_file_is_read_and_an_unreadable_one_is_an_error() -> Result {
    let fixture = Fixture::new(hub, store);
    let file = fixture.cache.path().join("token");
    let inspect = |token_path: Option<&Path>| {
        let mut command = encodle(&fixture);
        command.args(["inspect", "org/name"]);
        command.envs(token_path.map(|path| ("HF_TOKEN_PATH", path))).assert()
    };
    let tokens = || {
        let requests = fixture.hub.requests();
        requests.into_iter().map(|mut r| r.headers.remove("authorization")).collect::<Vec<_>>()
    };
    // A folder cannot be read as a file.
    fs::create_dir(&file)?;
    for path in [None, Some(file.as_path())] {
        let error = inspect(path).code(1).get_output().stderr.clone();
        let error = String::from_utf8(error)?;
        let start = format!("encodle: {} cannot be read: ", file.display());
        assert!(error.starts_with(&start), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    assert!(tokens().is_empty());
    fs::remove_dir(&file)?;
    inspect(None).success();
    assert!(!tokens().is_empty() && tokens().iter().all(Option::is_none), "{:?}", tokens());

    let fixture = Fixture::new(hub, store);
    fs::write(fixture.cache.path().join("token"), "secret\n")?;
    encodle(&fixture).args(["inspect", "org/name"]).assert().success();
    let requests = fixture.hub.requests();
    assert!(requests.iter().all(|r| r.headers["authorization"] == "Bearer secret"));
    Ok(())
}

/// The binary reads the environment variables of the hub.
#[test]
fn the_binary_loads_models_by_name() -> Result {
    let fixture = Fixture::new(hub, store);
    let encodle = |endpoint: &str, offline: &str, arguments: &[&str]| {
        encodle(&fixture)
            .args(arguments)
            .env("HF_ENDPOINT", endpoint)
            .env("HF_TOKEN", "secret")
            .env("HF_HUB_OFFLINE", offline)
            .assert()
    };
    let rerank = ["rerank", "--model", "org/name", "--query", "bad cab", "a cab", "fade"];
    let first = encodle(&fixture.hub.url, "0", &rerank).success().get_output().stdout.clone();
    assert_eq!(String::from_utf8(first.clone())?.lines().count(), 2);
    let requests = fixture.hub.requests();
    assert!(requests.iter().all(|r| r.headers["authorization"] == "Bearer secret"));
    let offline = encodle("http://127.0.0.1:1", "1", &rerank).success();
    assert_eq!(offline.get_output().stdout, first);
    assert!(offline.get_output().stderr.is_empty());

    let other = ["rerank", "--model", "org/other", "--query", "a", "b"];
    let error = encodle("http://127.0.0.1:1", "yes", &other).code(1).get_output().stderr.clone();
    let error = String::from_utf8(error)?;
    assert!(
        error.starts_with("encodle: modules.json of model org/other is not in the cache "),
        "{error}"
    );
    assert_eq!(error.lines().count(), 1);
    let inspected = encodle(&fixture.hub.url, "0", &["inspect", "org/name"]).success();
    let text = String::from_utf8(inspected.get_output().stdout.clone())?;
    assert!(text.contains("runs as      EncoderModel, EncoderForSequenceClassification"), "{text}");
    Ok(())
}
