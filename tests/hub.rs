//! Models of the hub, from servers of the test's own that answer as the hub and its store do.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
};

use assert_cmd::cargo::cargo_bin_cmd;
use candle_core::Device::Cpu;
use encoder::{Error, Hub, ModelFiles, Precision, TextClassifier};
use sha1::{Digest, Sha1};
use sha2::Sha256;
use tempfile::TempDir;

use crate::{cli::ON_CPU, support::golden};

type Result<T = ()> = anyhow::Result<T>;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const WEIGHTS: &str = "model.safetensors";

/// A request as a server got it.
#[derive(Clone, Debug)]
struct Request {
    method: String,
    path: String,
    headers: BTreeMap<String, String>,
}

/// What a server answers.
#[derive(Default)]
struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    /// The connection is closed after so many bytes of the body.
    cut: Option<usize>,
}

impl Answer {
    fn of(status: u16, headers: &[(&'static str, &str)]) -> Self {
        let headers = headers.iter().map(|&(name, value)| (name, value.to_string())).collect();
        Self { status, headers, ..Self::default() }
    }

    /// A file, or of it what a request asks for.
    fn file(request: &Request, bytes: &[u8]) -> Self {
        let range = request.headers.get("range").and_then(|range| range.strip_prefix("bytes="));
        let start: usize = range.map_or(0, |range| range.trim_end_matches('-').parse().unwrap());
        let content_range = format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len());
        let headers = vec![("Content-Range", content_range)];
        let status = if start > 0 { 206 } else { 200 };
        Self { status, headers, body: bytes[start..].to_vec(), cut: None }
    }
}

/// A server on loopback, and what it was asked.
struct Server {
    url: String,
    log: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    fn start(answer: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let log = Arc::new(Mutex::new(vec![]));
        let (answer, requests) = (Arc::new(answer), log.clone());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (answer, requests) = (answer.clone(), requests.clone());
                thread::spawn(move || serve(stream.unwrap(), &requests, &*answer));
            }
        });
        Self { url, log }
    }

    fn requests(&self) -> Vec<Request> {
        self.log.lock().unwrap().clone()
    }
}

/// One connection, one request.
fn serve(
    mut stream: TcpStream,
    log: &Mutex<Vec<Request>>,
    answer: &dyn Fn(&Request) -> Answer,
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
    let Answer { status, headers, body, cut } = answer(&request);
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

/// What comes of the weights of a hub with a quirk, for the table of conformance.
pub fn outcome(quirk: &str) -> String {
    let quirk = quirk.to_string();
    let of_store = quirk.clone();
    let setting = Setting::new(
        move |request, at| match quirk.as_str() {
            "401" => Answer::of(401, &[("X-Error-Code", "RepoNotFound")]),
            "403" => Answer::of(403, &[("X-Error-Code", "GatedRepo")]),
            "no revision" => Answer::of(404, &[("X-Error-Code", "RevisionNotFound")]),
            "503" => Answer::of(503, &[]),
            _ => hub(request, at),
        },
        move |request| {
            let mut answer = store(request);
            match of_store.as_str() {
                "cut" if answer.status == 200 => answer.cut = Some(10_000),
                "changed" => answer.body[700] ^= 1,
                "longer" => answer.body.push(0),
                _ => {}
            }
            answer
        },
    );
    match setting.weights() {
        Ok(bytes) if bytes == model_file(WEIGHTS).unwrap() => {
            format!("the file, in {} request(s) to the store", setting.store.requests().len())
        }
        Ok(_) => "other bytes".to_string(),
        Err(error) => format!("error: {}", error.to_string().replace(&setting.hub.url, "<hub>")),
    }
}

fn hex(hash: impl AsRef<[u8]>) -> String {
    hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn model_file(name: &str) -> Option<Vec<u8>> {
    fs::read(golden("heads/score").join(name)).ok()
}

/// As the hub answers for the model `org/name`, whose weights are in the store at `store`.
fn hub(request: &Request, store: &str) -> Answer {
    let Some((_, file)) = request.path.split_once("/resolve/").and_then(|(_, p)| p.split_once('/'))
    else {
        return Answer::of(404, &[("X-Error-Code", "RepoNotFound")]);
    };
    let commit = ("X-Repo-Commit", COMMIT);
    let Some(bytes) = model_file(file) else {
        return Answer::of(404, &[("X-Error-Code", "EntryNotFound"), commit]);
    };
    if file == WEIGHTS {
        let (etag, size) =
            (format!("\"{}\"", hex(Sha256::digest(&bytes))), bytes.len().to_string());
        let location = format!("{store}/{file}?signature=1");
        let linked =
            [("X-Linked-Etag", &etag[..]), ("X-Linked-Size", &size), ("Location", &location)];
        return Answer::of(302, &[&linked[..], &[commit]].concat());
    }
    let etag = hex(Sha1::new_with_prefix(format!("blob {}\0", bytes.len()))
        .chain_update(&bytes)
        .finalize());
    let mut answer = Answer::file(request, &bytes);
    answer.headers.extend([("ETag", format!("W/\"{etag}\"")), ("X-Repo-Commit", COMMIT.into())]);
    answer
}

/// The store of large files as it should be.
fn store(request: &Request) -> Answer {
    Answer::file(request, &model_file(WEIGHTS).unwrap())
}

/// A hub and a store, and an empty cache.
struct Setting {
    hub: Server,
    store: Server,
    cache: TempDir,
}

impl Setting {
    fn new(
        of_hub: impl Fn(&Request, &str) -> Answer + Send + Sync + 'static,
        of_store: impl Fn(&Request) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let store = Server::start(of_store);
        let at = store.url.clone();
        let hub = Server::start(move |request| of_hub(request, &at));
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

    /// What fetching the weights comes to.
    fn weights(&self) -> encoder::Result<Vec<u8>> {
        self.files().need(WEIGHTS, "weights").map(|bytes| bytes.into_owned())
    }

    fn error(&self) -> String {
        let Err(error) = self.weights() else { panic!("it was fetched") };
        error.to_string().replace(&self.hub.url, "<hub>")
    }

    /// The names in the folder of blobs.
    fn blobs(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder().join("blobs")).into_iter().flatten();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

fn scores(files: &ModelFiles) -> Result<Vec<f32>> {
    let model = TextClassifier::from_files(files, Precision::F32, &Cpu)?;
    Ok(model.rerank("bad cab", &["a cab", "fade"])?)
}

#[test]
fn a_model_is_fetched_once_and_then_in_the_cache() -> Result {
    let setting = Setting::new(hub, store);
    let expected = scores(&ModelFiles::dir(golden("heads/score"))?)?;
    assert_eq!(scores(&setting.files())?, expected);
    let asked = setting.hub.requests().len();
    assert_eq!(scores(&setting.files())?, expected);
    assert_eq!(scores(&setting.hub().model(&format!("org/name@{COMMIT}"))?)?, expected);
    assert_eq!(setting.hub.requests().len(), asked, "{:?}", setting.hub.requests());
    assert_eq!(setting.store.requests().len(), 1);
    let unreachable = setting.hub().with_endpoint("http://127.0.0.1:1").offline(true);
    assert_eq!(scores(&unreachable.model("org/name")?)?, expected);

    // As Python's huggingface_hub lays it out, so that either serves the other.
    let folder = setting.folder();
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

/// Only what is asked for is fetched, of the revision that is asked for.
#[test]
fn revisions_and_folders_are_asked_for() -> Result {
    let setting = Setting::new(hub, store);
    let files = setting.hub().model("org/name@refs/pr/1")?;
    files.need("config.json", "sizes")?;
    files.need("2 x/config.json", "sizes").unwrap_err();
    let paths: Vec<String> = setting.hub.requests().into_iter().map(|r| r.path).collect();
    assert_eq!(paths[0], "/org/name/resolve/refs%2Fpr%2F1/config.json");
    assert_eq!(paths[2], format!("/org/name/resolve/{COMMIT}/2%20x/config.json"));
    assert_eq!(fs::read_to_string(setting.folder().join("refs/refs/pr/1"))?, COMMIT);
    Ok(())
}

#[test]
fn the_token_goes_to_the_hub_alone() -> Result {
    let setting = Setting::new(hub, store);
    let files = setting.hub().with_token("secret").model("org/name")?;
    files.need(WEIGHTS, "weights")?;
    files.need("config.json", "sizes")?;
    for request in setting.hub.requests() {
        assert_eq!(request.headers.get("authorization").map(String::as_str), Some("Bearer secret"));
    }
    let to_store = setting.store.requests();
    assert!(!to_store.is_empty());
    assert!(to_store.iter().all(|r| !r.headers.contains_key("authorization")), "{to_store:?}");
    Ok(())
}

#[test]
fn a_cut_connection_is_resumed() -> Result {
    let setting = Setting::new(hub, |request| {
        let cut = (!request.headers.contains_key("range")).then_some(10_000);
        Answer { cut, ..store(request) }
    });
    assert_eq!(setting.weights()?, model_file(WEIGHTS).unwrap());
    let ranges: Vec<Option<String>> =
        setting.store.requests().iter().map(|r| r.headers.get("range").cloned()).collect();
    assert_eq!(ranges, [None, Some("bytes=10000-".to_string())]);
    Ok(())
}

/// By a later run, with what an earlier one left.
#[test]
fn an_interrupted_run_is_resumed() -> Result {
    let setting = Setting::new(hub, store);
    let bytes = model_file(WEIGHTS).unwrap();
    let etag = hex(Sha256::digest(&bytes));
    fs::create_dir_all(setting.folder().join("blobs"))?;
    let partial = setting.folder().join(format!("blobs/{etag}.incomplete"));
    fs::write(&partial, &bytes[..5000])?;
    assert_eq!(setting.weights()?, bytes);
    assert_eq!(setting.store.requests()[0].headers["range"], "bytes=5000-");
    assert_eq!(setting.blobs(), [etag]);
    Ok(())
}

/// A store that knows no ranges, and one that sends another part than was asked for.
#[test]
fn what_cannot_be_resumed_is_fetched_anew() -> Result {
    let whole = |request: &Request| {
        let request = Request { headers: BTreeMap::new(), ..request.clone() };
        store(&request)
    };
    let elsewhere = |request: &Request| {
        let mut answer = store(request);
        if answer.status == 206 {
            answer.headers = vec![("Content-Range", "bytes 0-9/10".to_string())];
        }
        answer
    };
    let bytes = model_file(WEIGHTS).unwrap();
    for setting in [Setting::new(hub, whole), Setting::new(hub, elsewhere)] {
        fs::create_dir_all(setting.folder().join("blobs"))?;
        let etag = hex(Sha256::digest(&bytes));
        fs::write(setting.folder().join(format!("blobs/{etag}.incomplete")), &bytes[1..300])?;
        assert_eq!(setting.weights()?, bytes);
    }
    Ok(())
}

#[test]
fn wrong_bytes_are_never_accepted() -> Result {
    let changed = Setting::new(hub, |request| {
        let mut answer = store(request);
        answer.body[700] ^= 1;
        answer
    });
    let error = changed.error();
    let url = format!("<hub>/org/name/resolve/{COMMIT}/{WEIGHTS}");
    assert!(
        error.starts_with(&format!("{url} was not fetched whole: expected SHA-256 ")),
        "{error}"
    );
    assert_eq!(changed.blobs(), [""; 0]);

    let longer = Setting::new(hub, |request| {
        let mut answer = store(request);
        answer.body.extend([0; 100_000]);
        answer
    });
    let error = longer.error();
    let size = model_file(WEIGHTS).unwrap().len();
    let expected = format!(": expected {size} bytes, got {} bytes; ", size + 1);
    assert!(error.contains(&expected), "{error}");
    assert_eq!(longer.blobs(), [""; 0]);

    let shorter = Setting::new(hub, |request| match request.headers.contains_key("range") {
        true => Answer::of(416, &[]),
        false => Answer::file(request, &model_file(WEIGHTS).unwrap()[..100]),
    });
    let error = shorter.error();
    assert!(error.contains(" cannot be fetched: "), "{error}");
    assert!(!setting_has_weights(&shorter));

    // Of a small file, by git's hash.
    let small = Setting::new(
        |request, at| {
            let mut answer = hub(request, at);
            answer.body.iter_mut().take(1).for_each(|byte| *byte = b' ');
            answer
        },
        store,
    );
    let error = small.files().need("config.json", "sizes").unwrap_err().to_string();
    assert!(error.contains("expected git's SHA-1 "), "{error}");
    Ok(())
}

fn setting_has_weights(setting: &Setting) -> bool {
    setting.blobs().iter().any(|name| !name.ends_with(".incomplete"))
}

#[test]
fn what_the_hub_refuses_is_told() -> Result {
    for (answer, expected) in [
        (
            (401, vec![("X-Error-Code", "RepoNotFound")]),
            "model org/name not found at <hub>: expected a public one, one that the token in \
             HF_TOKEN may read, or the path of a folder or a file",
        ),
        (
            (403, vec![("X-Error-Code", "GatedRepo")]),
            "model org/name may not be read: expected the token of somebody with access in \
             HF_TOKEN; ask for access at <hub>/org/name",
        ),
        (
            (404, vec![("X-Error-Code", "RevisionNotFound")]),
            "model org/name has no revision \"main\": expected a branch, a tag or a commit",
        ),
        (
            (404, vec![]),
            "model org/name not found at <hub>: expected a public one, one that the token in \
             HF_TOKEN may read, or the path of a folder or a file",
        ),
        (
            (418, vec![]),
            "<hub>/org/name/resolve/main/model.safetensors cannot be fetched: the hub answers 418; \
             try again later",
        ),
        (
            (200, vec![("ETag", "\"x\"")]),
            "<hub>/org/name/resolve/main/model.safetensors cannot be fetched: the answer has no \
             ETag or no X-Repo-Commit, as a hub's would; try again later",
        ),
        // Neither becomes a part of a path.
        (
            (200, vec![("ETag", "\"x\""), ("X-Repo-Commit", "../../..")]),
            "<hub>/org/name/resolve/main/model.safetensors cannot be fetched: the answer has no \
             ETag or no X-Repo-Commit, as a hub's would; try again later",
        ),
        (
            (200, vec![("ETag", "\"../../x\""), ("X-Repo-Commit", COMMIT)]),
            "<hub>/org/name/resolve/main/model.safetensors cannot be fetched: the answer has no \
             ETag or no X-Repo-Commit, as a hub's would; try again later",
        ),
    ] {
        let setting = Setting::new(move |_, _| Answer::of(answer.0, &answer.1), store);
        assert_eq!(setting.error(), expected);
    }
    Ok(())
}

#[test]
fn a_busy_hub_is_asked_again() -> Result {
    let tries = Mutex::new(0);
    let setting = Setting::new(
        move |request, at| {
            let mut tries = tries.lock().unwrap();
            *tries += 1;
            if *tries % 3 != 0 { Answer::of(503, &[]) } else { hub(request, at) }
        },
        store,
    );
    assert_eq!(setting.weights()?, model_file(WEIGHTS).unwrap());
    let busy = Setting::new(|_, _| Answer::of(503, &[]), store);
    assert!(busy.error().contains("the hub answers 503"), "{}", busy.error());
    Ok(())
}

/// A model that has another name now; and a circle.
#[test]
fn redirections_are_followed() -> Result {
    let renamed = |request: &Request, at: &str| match request.path.strip_prefix("/org/name/") {
        Some(rest) => Answer::of(307, &[("Location", &format!("/new/name/{rest}"))]),
        None => hub(request, at),
    };
    let setting = Setting::new(renamed, store);
    let files = setting.hub().with_token("secret").model("org/name")?;
    assert_eq!(files.need("vocab.txt", "words")?, model_file("vocab.txt").unwrap());
    let requests = setting.hub.requests();
    assert!(requests.iter().all(|request| request.headers.contains_key("authorization")));
    let circle = Setting::new(|r, _| Answer::of(307, &[("Location", &r.path)]), store);
    assert!(circle.error().contains("redirected more than 10 times"), "{}", circle.error());
    Ok(())
}

#[test]
fn offline_only_the_cache_is_asked() -> Result {
    let setting = Setting::new(hub, store);
    let files = setting.hub().offline(true).model("org/name")?;
    let error = files.need("config.json", "sizes").unwrap_err();
    assert!(matches!(error, Error::Offline { .. }), "{error}");
    setting.files().need("config.json", "sizes")?;
    let asked = setting.hub.requests().len();
    let files = setting.hub().offline(true).model("org/name")?;
    files.need("config.json", "sizes")?;
    let error = files.need("vocab.txt", "word pieces").unwrap_err().to_string();
    assert!(error.starts_with("vocab.txt of model org/name is not in the cache "), "{error}");
    assert_eq!(setting.hub.requests().len(), asked);
    Ok(())
}

/// As on a journey, with a cache that Python filled: it has no marks of what the model lacks.
#[test]
fn what_the_cache_has_is_enough_where_the_hub_is_not_reached() -> Result {
    let setting = Setting::new(hub, store);
    let expected = scores(&setting.files())?;
    fs::remove_dir_all(setting.folder().join(".no_exist"))?;
    let unreachable = setting.hub().with_endpoint("http://127.0.0.1:1");
    assert_eq!(scores(&unreachable.model("org/name")?)?, expected);
    fs::remove_file(setting.folder().join("snapshots").join(COMMIT).join(WEIGHTS))?;
    let error = scores(&unreachable.model("org/name")?).unwrap_err().to_string();
    assert!(
        error.starts_with("model.safetensors of model org/name is not in the cache "),
        "{error}"
    );
    Ok(())
}

/// Which a newer one replaces on the branch while the first is loaded.
#[test]
fn all_files_are_of_one_commit() -> Result {
    const NEWER: &str = "89abcdef0123456789abcdef0123456789abcdef";
    let setting = Setting::new(
        |request, at| {
            let mut answer = hub(request, at);
            if request.path.contains("/main/") {
                let newer = if request.path.contains("config") { COMMIT } else { NEWER };
                answer.headers.retain(|(name, _)| *name != "X-Repo-Commit");
                answer.headers.push(("X-Repo-Commit", newer.to_string()));
            }
            answer
        },
        store,
    );
    let files = setting.files();
    files.need("config.json", "sizes")?;
    fs::write(setting.folder().join("refs/main"), NEWER)?;
    files.need("vocab.txt", "word pieces")?;
    let last = setting.hub.requests().pop().unwrap();
    assert_eq!(last.path, format!("/org/name/resolve/{COMMIT}/vocab.txt"));
    Ok(())
}

#[test]
fn a_wrong_leftover_is_fetched_anew() -> Result {
    let setting = Setting::new(hub, store);
    let bytes = model_file(WEIGHTS).unwrap();
    let etag = hex(Sha256::digest(&bytes));
    fs::create_dir_all(setting.folder().join("blobs"))?;
    for wrong in [vec![7; 300], vec![7; bytes.len()], vec![7; bytes.len() + 1]] {
        fs::write(setting.folder().join(format!("blobs/{etag}.incomplete")), wrong)?;
        assert_eq!(setting.weights()?, bytes);
        fs::remove_dir_all(setting.folder().join("snapshots"))?;
        fs::remove_file(setting.folder().join(format!("blobs/{etag}")))?;
    }
    Ok(())
}

#[test]
fn the_token_is_not_shown() {
    let hub = Hub::new("nowhere").with_token("secret");
    assert!(!format!("{hub:?} {:?}", hub.model("org/name")).contains("secret"));
}

/// Two at once, and one of them within an asynchronous runtime.
#[test]
fn fetching_works_in_and_outside_a_runtime() -> Result {
    let setting = Setting::new(hub, store);
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    thread::scope(|scope| {
        let other = scope.spawn(|| setting.weights().unwrap().len());
        let own = runtime.block_on(async { setting.weights().unwrap().len() });
        assert_eq!(other.join().unwrap(), own);
    });
    assert_eq!(setting.store.requests().len(), 1, "the second waits for the first");
    Ok(())
}

#[test]
fn progress_is_told() -> Result {
    let setting = Setting::new(hub, store);
    let seen = Arc::new(Mutex::new(vec![]));
    let told = seen.clone();
    let hub = setting.hub().with_progress(move |fetched| {
        told.lock().unwrap().push((fetched.file.to_string(), fetched.bytes, fetched.of));
    });
    hub.model("org/name")?.need(WEIGHTS, "weights")?;
    let size = model_file(WEIGHTS).unwrap().len() as u64;
    let seen = seen.lock().unwrap();
    assert_eq!(seen.last(), Some(&(WEIGHTS.to_string(), size, Some(size))));
    Ok(())
}

/// The environment's settings, through the command.
#[test]
fn the_command_takes_names_of_models() -> Result {
    let setting = Setting::new(hub, store);
    let bert = |endpoint: &str, offline: &str, arguments: &[&str]| {
        cargo_bin_cmd!("bert")
            .args(arguments)
            .envs([ON_CPU])
            .env("HF_ENDPOINT", endpoint)
            .env("HF_HOME", setting.cache.path())
            .env("HF_TOKEN", "secret")
            .env("HF_HUB_OFFLINE", offline)
            .env_remove("HF_HUB_CACHE")
            .assert()
    };
    let rerank = ["rerank", "--model", "org/name", "--query", "bad cab", "a cab", "fade"];
    let first = bert(&setting.hub.url, "0", &rerank).success().get_output().stdout.clone();
    assert_eq!(String::from_utf8(first.clone())?.lines().count(), 2);
    let requests = setting.hub.requests();
    assert!(requests.iter().all(|r| r.headers["authorization"] == "Bearer secret"));
    let offline = bert("http://127.0.0.1:1", "1", &rerank).success();
    assert_eq!(offline.get_output().stdout, first);
    assert!(offline.get_output().stderr.is_empty());

    let other = ["rerank", "--model", "org/other", "--query", "a", "b"];
    let error = bert("http://127.0.0.1:1", "yes", &other).code(1).get_output().stderr.clone();
    let error = String::from_utf8(error)?;
    assert!(
        error.starts_with("bert: modules.json of model org/other is not in the cache "),
        "{error}"
    );
    assert_eq!(error.lines().count(), 1);
    let inspected = bert(&setting.hub.url, "0", &["inspect", "org/name"]).success();
    let text = String::from_utf8(inspected.get_output().stdout.clone())?;
    assert!(text.contains("runs as     BertModel, BertForSequenceClassification"), "{text}");
    Ok(())
}
