//! Models of the Hugging Face hub, in the cache that Python's `huggingface_hub` keeps: each file is
//! fetched when it is first asked for, checked, and served from the cache from then on.
//!
//! The layout of the cache is that of the `hf-hub` crate. What goes over the network is written
//! here: `hf-hub` 0.5 sends the token to hosts that the hub redirects to, and neither it nor 1.0
//! compares what arrives with the hub's length and hash.

use std::{
    env, fmt,
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, Write},
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use hf_hub::{Cache, Repo, RepoType};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use sha1::{Digest, Sha1};
use sha2::Sha256;
use ureq::{
    Agent, Body,
    http::{Response, Uri, header::AUTHORIZATION},
    tls::{RootCerts, TlsConfig},
};

use super::save::temporary;
use crate::{Error, ModelFiles, Result};

const ENDPOINT: &str = "https://huggingface.co";

/// The branch that a model's name alone means.
const MAIN: &str = "main";

/// All but what a part of a path may have as it is.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// How often a request is made that fails for a reason that may pass, and the first wait between.
const ATTEMPTS: u32 = 5;
const WAIT: Duration = Duration::from_millis(200);

/// As long as this is waited if the hub asks for it.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// How many redirections of a request are followed.
const REDIRECTIONS: usize = 10;

/// Where models are fetched from and kept.
///
/// # Examples
/// A model that the cache has needs no network:
/// ```
/// use encoder::Hub;
///
/// let cache = tempfile::tempdir().unwrap();
/// let commit = "0123456789abcdef0123456789abcdef01234567";
/// let folder = cache.path().join("models--org--name");
/// std::fs::create_dir_all(folder.join("snapshots").join(commit)).unwrap();
/// std::fs::create_dir_all(folder.join("refs")).unwrap();
/// std::fs::write(folder.join("refs/main"), commit).unwrap();
/// std::fs::write(folder.join("snapshots").join(commit).join("config.json"), "{}").unwrap();
///
/// let files = Hub::new(cache.path()).offline(true).model("org/name")?;
/// assert_eq!(files.need("config.json", "sizes")?.len(), 2);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Hub {
    cache: Cache,
    endpoint: String,
    token: Option<Token>,
    offline: bool,
    progress: Progress,
}

/// Not to be shown.
#[derive(Clone)]
struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// What of a file has been fetched, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetched<'a> {
    /// The file, in the model's folder.
    pub file: &'a str,
    /// What is there already.
    pub bytes: u64,
    /// Its length, where the hub says it.
    pub of: Option<u64>,
}

type Tell = dyn Fn(Fetched) + Send + Sync;

#[derive(Clone, Default)]
struct Progress(Option<Arc<Tell>>);

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Progress" } else { "None" })
    }
}

impl Hub {
    /// The public hub with a cache in a folder, no token, and of the environment proxies alone.
    pub fn new(cache: impl Into<PathBuf>) -> Self {
        Self {
            cache: Cache::new(cache.into()),
            endpoint: ENDPOINT.to_string(),
            token: None,
            offline: false,
            progress: Progress::default(),
        }
    }

    /// As the environment says, as for Python: the cache of `HF_HUB_CACHE`, or in `HF_HOME`, or in
    /// `XDG_CACHE_HOME`, or in `~/.cache/huggingface`; the token of `HF_TOKEN`, or of the file that
    /// `HF_TOKEN_PATH` names, or of the one that a login left, unless
    /// `HF_HUB_DISABLE_IMPLICIT_TOKEN`; `HF_ENDPOINT`; `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE`.
    ///
    /// # Errors
    /// [`Error::NoCache`] if the environment names no home.
    pub fn from_env() -> Result<Self> {
        let variable = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        let yes = |name: &str| {
            let value = variable(name).unwrap_or_default().to_lowercase();
            ["1", "on", "yes", "true"].contains(&value.as_str())
        };
        let path = |name: &str| {
            let path = PathBuf::from(variable(name)?);
            Some(match (path.strip_prefix("~"), env::home_dir()) {
                (Ok(below), Some(home)) => home.join(below),
                _ => path,
            })
        };
        let home = path("HF_HOME")
            .or_else(|| Some(path("XDG_CACHE_HOME")?.join("huggingface")))
            .or_else(|| Some(env::home_dir()?.join(".cache/huggingface")))
            .ok_or(Error::NoCache)?;
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        let token = variable("HF_TOKEN").or_else(|| {
            let path = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
            fs::read_to_string(path).ok()
        });
        let token = token.map(|token| token.trim().to_string()).filter(|token| !token.is_empty());
        let hub = Self::new(cache.unwrap_or_else(|| home.join("hub")))
            .with_endpoint(variable("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_string()))
            .offline(yes("HF_HUB_OFFLINE") || yes("TRANSFORMERS_OFFLINE"));
        Ok(match token {
            Some(token) if !yes("HF_HUB_DISABLE_IMPLICIT_TOKEN") => hub.with_token(token),
            _ => hub,
        })
    }

    /// Another hub than the public one.
    pub fn with_endpoint(self, endpoint: impl Into<String>) -> Self {
        Self { endpoint: endpoint.into().trim_end_matches('/').to_string(), ..self }
    }

    /// Shows the hub who asks. No other host gets the token.
    pub fn with_token(self, token: impl Into<String>) -> Self {
        Self { token: Some(Token(token.into())), ..self }
    }

    /// Whether only the cache is asked.
    pub fn offline(self, offline: bool) -> Self {
        Self { offline, ..self }
    }

    /// Tells of what is fetched while it is.
    pub fn with_progress(self, progress: impl Fn(Fetched) + Send + Sync + 'static) -> Self {
        Self { progress: Progress(Some(Arc::new(progress))), ..self }
    }

    /// The files of the model `org/name`, or of `org/name@revision`: a branch, a tag or a commit.
    /// Nothing is fetched before it is asked for. What the cache has of a branch is taken as it is;
    /// offline, or where the hub cannot be reached, a file that it lacks counts as one that the model
    /// has not, as for Python, unless the model cannot do without.
    ///
    /// Fetching blocks, and needs no asynchronous runtime; within one, give it a thread where
    /// blocking is allowed.
    ///
    /// # Errors
    /// [`Error::ModelId`] if it is no such name.
    pub fn model(&self, id: &str) -> Result<ModelFiles> {
        let (name, revision) = id.split_once('@').unwrap_or((id, MAIN));
        let fits = |part: &str| {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            !part.is_empty() && part.chars().all(plain) && !part.starts_with('.')
        };
        let is_name = matches!(name.split('/').collect::<Vec<_>>()[..], [org, name] if fits(org) && fits(name));
        if !is_name || name.contains("--") || !revision.split('/').all(fits) {
            return Err(Error::ModelId { got: id.to_string() });
        }
        let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build();
        let agent = Agent::config_builder()
            .tls_config(tls)
            .https_only(self.endpoint.starts_with("https://"))
            .http_status_as_error(false)
            .max_redirects(0) // followed here, where the token stays behind
            .timeout_connect(Some(Duration::from_secs(10)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .timeout_per_read(Some(Duration::from_secs(60)))
            .user_agent(concat!("bert/", env!("CARGO_PKG_VERSION")))
            .build()
            .into();
        let revision = revision.to_string();
        let repo = Repo::with_revision(name.to_string(), RepoType::Model, revision.clone());
        let folder = self.cache.path().join(repo.folder_name());
        let (hub, id, commit) = (self.clone(), name.to_string(), OnceLock::new());
        let gave_up = AtomicBool::new(false);
        Ok(ModelFiles::hub(HubModel { hub, id, revision, folder, commit, agent, gave_up }))
    }
}

/// A model of the hub.
#[derive(Debug)]
pub(super) struct HubModel {
    hub: Hub,
    id: String,
    revision: String,
    /// Its folder in the cache.
    folder: PathBuf,
    /// What the revision stands for, once it is known: all files are of one commit.
    commit: OnceLock<String>,
    agent: Agent,
    /// Patience was in vain once, and is not had again.
    gave_up: AtomicBool,
}

/// What the hub says of a file.
struct Metadata {
    commit: String,
    etag: String,
    size: Option<u64>,
}

/// What comes of a try.
enum Tried<T> {
    Done(T),
    /// It failed for a reason that may pass.
    Again(String),
    /// The same, and it came further than ever before.
    Forward(String),
}

impl HubModel {
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// A file's place in the cache, where it is fetched to if it is not there; `None` if the model
    /// has none of this name, or as long as nobody can tell.
    pub(super) fn get(&self, file: &str) -> Result<Option<PathBuf>> {
        let commit = self.cached_commit();
        if let Some(commit) = &commit {
            let pointer = self.pointer(commit, file);
            if pointer.exists() {
                return Ok(Some(pointer));
            }
            if self.hub.offline || self.absent(commit, file).exists() {
                return Ok(None);
            }
        }
        if self.hub.offline {
            return Err(self.offline(file));
        }
        let metadata = match self.metadata(file) {
            Ok(Some(metadata)) => metadata,
            Ok(None) => return Ok(None),
            // What the cache has may be enough.
            Err(Error::Fetch { .. }) if commit.is_some() && self.gave_up.load(Relaxed) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let pointer = self.pointer(&metadata.commit, file);
        self.fetch(file, &metadata)?;
        self.link(&metadata.etag, &pointer).map_err(|error| io_error(&pointer, error))?;
        Ok(Some(pointer))
    }

    /// Of a file that [`Self::get`] did not find the error, if it may be there all the same.
    pub(super) fn unknown(&self, file: &str) -> Option<Error> {
        let known = |commit: String| self.absent(&commit, file).exists();
        let asked = !self.hub.offline && !self.gave_up.load(Relaxed);
        (!asked && !self.cached_commit().is_some_and(known)).then(|| self.offline(file))
    }

    fn offline(&self, file: &str) -> Error {
        let cache = self.hub.cache.path().display().to_string();
        Error::Offline { id: self.id.clone(), file: file.to_string(), cache }
    }

    /// The commit that the revision stands for as far as is known without asking the hub.
    fn cached_commit(&self) -> Option<String> {
        if is_commit(&self.revision) {
            return Some(self.revision.clone());
        }
        self.commit.get().cloned().or_else(|| {
            let commit = fs::read_to_string(self.reference()).ok()?.trim().to_string();
            is_commit(&commit).then(|| self.commit.get_or_init(|| commit).clone())
        })
    }

    fn reference(&self) -> PathBuf {
        self.folder.join("refs").join(&self.revision)
    }

    fn pointer(&self, commit: &str, file: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit).join(file)
    }

    /// The mark that a commit has no such file.
    fn absent(&self, commit: &str, file: &str) -> PathBuf {
        self.folder.join(".no_exist").join(commit).join(file)
    }

    fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    fn url(&self, file: &str) -> String {
        let escaped = |part: &str| utf8_percent_encode(part, ESCAPED).to_string();
        let revision = escaped(&self.cached_commit().unwrap_or_else(|| self.revision.clone()));
        let file: Vec<String> = file.split('/').map(escaped).collect();
        format!("{}/{}/resolve/{revision}/{}", self.hub.endpoint, self.id, file.join("/"))
    }

    /// Asks the hub for a file's commit, hash and length, and notes the commit, or that there is no
    /// such file.
    fn metadata(&self, file: &str) -> Result<Option<Metadata>> {
        let (asked_for, url) = (self.cached_commit(), self.url(file));
        let response = self.patiently(&url, || self.request("HEAD", &url, 0))?;
        let header = |name: &str| response.headers().get(name).and_then(|v| v.to_str().ok());
        let commit = header("x-repo-commit").filter(|commit| is_commit(commit));
        if let Some(commit) = commit {
            let held = self.commit.get_or_init(|| commit.to_string());
            if held != commit && asked_for.as_ref() != Some(held) {
                return self.metadata(file); // of the commit that the other files are of
            }
            self.keep_commit(commit);
        }
        let status = response.status().as_u16();
        let id = || self.id.clone();
        let endpoint = || self.hub.endpoint.clone();
        match (status, header("x-error-code")) {
            (200..=399, _) => {}
            (404, Some("EntryNotFound")) | (404, None) if commit.is_some() => {
                // A cache that cannot be written may be a whole one.
                let _ = create(&self.absent(commit.unwrap_or_default(), file));
                return Ok(None);
            }
            (404, Some("EntryNotFound")) => return Ok(None),
            (404, Some("RevisionNotFound")) => {
                return Err(Error::NoRevision { id: id(), revision: self.revision.clone() });
            }
            (403, _) | (_, Some("GatedRepo")) => {
                return Err(Error::Gated { id: id(), endpoint: endpoint() });
            }
            (401 | 404, _) => return Err(Error::NoModel { id: id(), endpoint: endpoint() }),
            _ => return Err(Error::Fetch { url, what: format!("the hub answers {status}") }),
        }
        let etag = header("x-linked-etag").or(header("etag")).map(plain_etag);
        let (Some(etag), Some(commit)) = (etag.filter(|etag| is_plain(etag)), commit) else {
            let what = "the answer has no ETag or no X-Repo-Commit, as a hub's would".to_string();
            return Err(Error::Fetch { url, what });
        };
        let size = match status {
            200 => header("x-linked-size").or(header("content-length")),
            _ => header("x-linked-size"), // the length is that of the redirection
        };
        let (commit, etag) = (commit.to_string(), etag.to_string());
        Ok(Some(Metadata { commit, etag, size: size.and_then(|size| size.parse().ok()) }))
    }

    /// Notes in the cache what the revision stands for, if it can be written.
    fn keep_commit(&self, commit: &str) {
        let path = self.reference();
        if is_commit(&self.revision) || fs::read_to_string(&path).is_ok_and(|held| held == commit) {
            return;
        }
        let write = || {
            let folder = path.parent().unwrap_or(&self.folder);
            fs::create_dir_all(folder)?;
            let mut file = temporary(folder)?;
            file.write_all(commit.as_bytes())?;
            file.persist(&path)?;
            io::Result::Ok(())
        };
        let _ = write();
    }

    /// Fetches a file to its blob, unless that is there.
    fn fetch(&self, file: &str, metadata: &Metadata) -> Result<()> {
        let (url, blob) = (self.url(file), self.blob(&metadata.etag));
        let failed = |error| io_error(&blob, error);
        // Other processes, Python's among them, wait for the one that has the lock.
        let folder = self.folder.file_name().unwrap_or_default();
        let lock = self.hub.cache.path().join(".locks").join(folder);
        let lock = create(&lock.join(format!("{}.lock", metadata.etag))).map_err(failed)?;
        lock.lock().map_err(failed)?;
        if blob.exists() {
            return Ok(());
        }
        let partial = blob.with_file_name(format!("{}.incomplete", metadata.etag));
        let mut to = create(&partial).map_err(failed)?;
        let mut resumed = to.metadata().map_err(failed)?.len() > 0;
        loop {
            let mut most = 0;
            self.patiently(&url, || {
                let tried = self.fetch_rest(file, &url, metadata, &mut to)?;
                let len = to.metadata().map_err(failed)?.len();
                let forward = len > most;
                most = most.max(len);
                Ok(match tried {
                    Tried::Again(what) if forward => Tried::Forward(what),
                    tried => tried,
                })
            })?;
            match is_right(&mut to, metadata).map_err(failed)? {
                Ok(()) => break,
                // What an earlier run left was wrong.
                Err(_) if std::mem::take(&mut resumed) => to.set_len(0).map_err(failed)?,
                Err((expected, got)) => {
                    fs::remove_file(&partial).map_err(failed)?;
                    return Err(Error::WrongFile { url, expected, got });
                }
            }
        }
        to.sync_all().and_then(|()| fs::rename(&partial, &blob)).map_err(failed)
    }

    /// What of a file is not there yet.
    fn fetch_rest(
        &self,
        file: &str,
        url: &str,
        metadata: &Metadata,
        to: &mut File,
    ) -> Result<Tried<()>> {
        let failed = |error| io_error(&self.blob(&metadata.etag), error);
        let mut start = to.seek(io::SeekFrom::End(0)).map_err(failed)?;
        if metadata.size == Some(start) && start > 0 {
            return Ok(Tried::Done(()));
        }
        if metadata.size.is_some_and(|size| size < start) {
            to.set_len(0).map_err(failed)?;
            start = to.seek(io::SeekFrom::Start(0)).map_err(failed)?;
        }
        let response = match self.request("GET", url, start)? {
            Tried::Done(response) => response,
            Tried::Again(what) | Tried::Forward(what) => return Ok(Tried::Again(what)),
        };
        let range = response.headers().get("content-range").and_then(|v| v.to_str().ok());
        let resumes = range.is_some_and(|range| range.starts_with(&format!("bytes {start}-")));
        match response.status().as_u16() {
            206 if resumes => {}
            200 => {
                to.set_len(0).map_err(failed)?;
                start = to.seek(io::SeekFrom::Start(0)).map_err(failed)?;
            }
            206 | 416 => {
                to.set_len(0).map_err(failed)?;
                return Ok(Tried::Again("it cannot be resumed".to_string()));
            }
            status => {
                let what = format!("the hub answers {status}");
                return Err(Error::Fetch { url: url.to_string(), what });
            }
        }
        // A byte more than there should be is enough to see that it is another file.
        let most = metadata.size.map_or(u64::MAX, |size| (size - start).saturating_add(1));
        let mut body = response.into_body().into_reader().take(most);
        let mut bytes = vec![0; 1 << 16];
        loop {
            match body.read(&mut bytes) {
                Ok(0) => break,
                Ok(n) => {
                    to.write_all(&bytes[..n]).map_err(failed)?;
                    start += n as u64;
                    if let Some(progress) = &self.hub.progress.0 {
                        progress(Fetched { file, bytes: start, of: metadata.size });
                    }
                }
                Err(error) => return Ok(Tried::Again(error.to_string())),
            }
        }
        match metadata.size {
            Some(size) if start < size => Ok(Tried::Again("the connection was cut".to_string())),
            _ => Ok(Tried::Done(())),
        }
    }

    /// Tries until it is done, or has failed too often without coming forward.
    fn patiently<T>(&self, url: &str, mut try_it: impl FnMut() -> Result<Tried<T>>) -> Result<T> {
        let mut attempt = 0;
        loop {
            let what = match try_it()? {
                Tried::Done(done) => {
                    self.gave_up.store(false, Relaxed);
                    return Ok(done);
                }
                Tried::Forward(what) => {
                    attempt = 0;
                    what
                }
                Tried::Again(what) => what,
            };
            attempt += 1;
            if attempt == ATTEMPTS || self.gave_up.load(Relaxed) {
                self.gave_up.store(true, Relaxed);
                return Err(Error::Fetch { url: url.to_string(), what });
            }
            thread::sleep(WAIT * 2u32.pow(attempt - 1));
        }
    }

    /// The answer to a request of a file from `start` on, wherever it is redirected to; of a HEAD
    /// as far as the hub itself answers.
    fn request(&self, method: &str, url: &str, start: u64) -> Result<Tried<Response<Body>>> {
        let error = |url: &str, what: String| Error::Fetch { url: url.to_string(), what };
        let mut uri: Uri = url.parse().map_err(|e| error(url, format!("{e}")))?;
        let home = origin(&uri);
        for _ in 0..REDIRECTIONS {
            let mut request = match method {
                "HEAD" => self.agent.head(&uri),
                _ => self.agent.get(&uri),
            };
            request = request.header("accept-encoding", "identity");
            if let Some(Token(token)) = self.hub.token.as_ref().filter(|_| origin(&uri) == home) {
                request = request.header(AUTHORIZATION, format!("Bearer {token}"));
            }
            if start > 0 {
                request = request.header("range", format!("bytes={start}-"));
            }
            let response = match request.call() {
                Ok(response) => response,
                Err(failed @ (ureq::Error::BadUri(_) | ureq::Error::Tls(_))) => {
                    return Err(error(url, failed.to_string()));
                }
                Err(failed) => return Ok(Tried::Again(failed.to_string())),
            };
            let status = response.status();
            if [408, 429, 500, 502, 503, 504].contains(&status.as_u16()) {
                let after = response.headers().get("retry-after").and_then(|v| v.to_str().ok());
                if let Some(seconds) = after.and_then(|after| after.parse().ok()) {
                    thread::sleep(Duration::from_secs(seconds).min(LONGEST_WAIT));
                }
                return Ok(Tried::Again(format!("the hub answers {}", status.as_u16())));
            }
            let known = method == "HEAD" && response.headers().contains_key("x-linked-etag");
            if !status.is_redirection() || known {
                return Ok(Tried::Done(response));
            }
            let location = response.headers().get("location").and_then(|l| l.to_str().ok());
            let Some(next) = location.and_then(|location| redirected(&uri, location)) else {
                return Err(error(url, "it is redirected to nowhere".to_string()));
            };
            uri = next;
        }
        Err(error(url, format!("it is redirected more than {REDIRECTIONS} times")))
    }

    /// Makes a name of a commit's file point at its blob.
    fn link(&self, etag: &str, pointer: &Path) -> io::Result<()> {
        if let Some(folder) = pointer.parent() {
            fs::create_dir_all(folder)?;
        }
        #[cfg(unix)]
        {
            let above =
                pointer.strip_prefix(&self.folder).map_or(0, |p| p.components().count() - 1);
            let mut target: PathBuf = std::iter::repeat_n("..", above).collect();
            target.extend(["blobs", etag]);
            match std::os::unix::fs::symlink(target, pointer) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
                _ => Ok(()),
            }
        }
        #[cfg(not(unix))]
        {
            let mut copy = temporary(pointer.parent().unwrap_or(&self.folder))?;
            io::copy(&mut File::open(self.blob(etag))?, &mut copy)?;
            copy.persist(pointer)?;
            Ok(())
        }
    }
}

/// A file in a folder that may not be there yet.
fn create(path: &Path) -> io::Result<File> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}

/// Whether a file has the length and the hash that the hub says, or else what was expected and what
/// it has. A hash is the file's SHA-256, or the SHA-1 that git gives it.
fn is_right(
    file: &mut File,
    metadata: &Metadata,
) -> io::Result<std::result::Result<(), (String, String)>> {
    let len = file.metadata()?.len();
    if let Some(size) = metadata.size.filter(|&size| size != len) {
        return Ok(Err((format!("{size} bytes"), format!("{len} bytes"))));
    }
    file.seek(io::SeekFrom::Start(0))?;
    let is_hash = metadata.etag.chars().all(|c| c.is_ascii_hexdigit());
    let (name, got) = match metadata.etag.len() {
        64 if is_hash => ("SHA-256", hash(file, Sha256::new())?),
        40 if is_hash => {
            let header = format!("blob {len}\0");
            ("git's SHA-1", hash(file, Sha1::new_with_prefix(header))?)
        }
        _ => return Ok(Ok(())),
    };
    match got == metadata.etag {
        true => Ok(Ok(())),
        false => Ok(Err((format!("{name} {}", metadata.etag), got))),
    }
}

fn hash(file: &mut File, mut hash: impl Digest) -> io::Result<String> {
    let mut bytes = vec![0; 1 << 16];
    loop {
        match file.read(&mut bytes)? {
            0 => break,
            n => hash.update(&bytes[..n]),
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn io_error(path: &Path, source: io::Error) -> Error {
    Error::Cache { path: path.display().to_string(), source }
}

fn is_commit(commit: &str) -> bool {
    commit.len() == 40 && commit.chars().all(|c| c.is_ascii_hexdigit())
}

/// An ETag without what HTTP puts around it.
fn plain_etag(etag: &str) -> &str {
    etag.trim_start_matches("W/").trim_matches('"')
}

/// Whether it can be a file's name.
fn is_plain(etag: &str) -> bool {
    !etag.is_empty() && etag.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c))
}

/// Whom a request goes to.
fn origin(uri: &Uri) -> (Option<String>, Option<String>, Option<u16>) {
    let port = uri.port_u16().or(match uri.scheme_str() {
        Some("https") => Some(443),
        _ => Some(80),
    });
    (uri.scheme_str().map(String::from), uri.host().map(str::to_lowercase), port)
}

/// Where `location` leads from `uri`.
fn redirected(uri: &Uri, location: &str) -> Option<Uri> {
    if let Some(path) = location.strip_prefix('/').filter(|rest| !rest.starts_with('/')) {
        let authority = uri.authority()?;
        return format!("{}://{authority}/{path}", uri.scheme_str()?).parse().ok();
    }
    let next: Uri = location.parse().ok()?;
    (next.scheme().is_some() && next.authority().is_some()).then_some(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_models_are_asked_for() {
        let hub = Hub::new("nowhere");
        for id in ["org/name", "org/name@v1.0", "org/name@refs/pr/3", "a-b/c.d_e"] {
            assert!(hub.model(id).is_ok(), "{id}");
        }
        for id in
            ["", "name", "a/b/c", "../x", "a/..", "a/b@", "a/b@../x", "a/b c", "a--b/c", "/a/b"]
        {
            assert!(matches!(hub.model(id), Err(Error::ModelId { .. })), "{id}");
        }
    }

    #[test]
    fn redirections_lead_where_they_say() {
        let uri: Uri = "http://host:81/a/b?c".parse().unwrap();
        let to = |location| redirected(&uri, location).map(|uri| uri.to_string());
        assert_eq!(to("/x?y").as_deref(), Some("http://host:81/x?y"));
        assert_eq!(to("https://cdn/x").as_deref(), Some("https://cdn/x"));
        assert_eq!(to("x"), None);
        assert_ne!(origin(&uri), origin(&"http://host:82/".parse().unwrap()));
        assert_eq!(
            origin(&"https://h/".parse().unwrap()),
            origin(&"https://H:443/".parse().unwrap())
        );
    }
}
