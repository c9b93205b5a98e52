//! Models of the Hugging Face Hub. Files are downloaded on first use, verified against the hub's
//! length and hash, and read from the cache afterwards. The cache is shared with Python's
//! `huggingface_hub`.
//!
//! The `hf-hub` crate provides the cache's layout. The HTTP requests are made here, for two
//! reasons: `hf-hub` 0.5 sends the token to hosts that the hub redirects to, and neither 0.5 nor
//! 1.0 verifies the length and hash of a download.

use std::{
    env, fmt,
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, Write},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
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
    Agent, Body, Proxy, ProxyProtocol, Timeout,
    http::{Response, Uri, header::AUTHORIZATION},
    tls::{RootCerts, TlsConfig},
};

use super::{
    files::RemoteFiles,
    home::{huggingface_home, path_variable},
    save::temporary,
};
use crate::{Error, FileError, HubError, ModelFiles, Result};

const ENDPOINT: &str = "https://huggingface.co";

/// The default revision.
const MAIN: &str = "main";

/// Characters to percent-encode in a path segment: all but RFC 3986's unreserved characters.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Maximum number of consecutive attempts, for transient failures. An attempt with progress
/// restarts the count at 1.
const ATTEMPTS: u32 = 5;

/// Wait before the second attempt. It doubles with every further attempt.
const FIRST_WAIT: Duration = Duration::from_millis(200);

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout of a response, and of each read of its body.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum wait that a `Retry-After` header can request.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);

/// Maximum number of redirects of a request.
const MAX_REDIRECTS: usize = 10;

/// A model hub and the local cache of its models.
///
/// # Examples
/// Loading a cached model needs no network:
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
    endpoint: Endpoint,
    token: Option<Token>,
    offline: bool,
    progress: Progress,
}

/// An access token. `Debug` hides it.
#[derive(Clone)]
struct Token(String);

/// The URL of a hub. Its credentials are not printed.
#[derive(Clone)]
struct Endpoint(String);

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        without_credentials(&self.0).fmt(f)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// Progress of a download.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DownloadProgress<'a> {
    /// The file's path in the model's repository.
    pub file: &'a str,
    /// Number of bytes downloaded so far.
    pub bytes: u64,
    /// The file's length in bytes.
    pub total: u64,
}

type ProgressFn = dyn Fn(DownloadProgress) + Send + Sync;

#[derive(Clone, Default)]
struct Progress(Option<Arc<ProgressFn>>);

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Progress" } else { "None" })
    }
}

impl Hub {
    /// The public hub with its cache in a folder, and without a token. The only environment
    /// variables that are used are those of proxies.
    pub fn new(cache: impl Into<PathBuf>) -> Self {
        Self {
            cache: Cache::new(cache.into()),
            endpoint: Endpoint(ENDPOINT.to_string()),
            token: None,
            offline: false,
            progress: Progress::default(),
        }
    }

    /// A hub configured by the environment variables of Python's `huggingface_hub`:
    ///
    /// - cache: `HF_HUB_CACHE`, or else `HUGGINGFACE_HUB_CACHE`, or else the `hub` folder in
    ///   `HF_HOME`, in `$XDG_CACHE_HOME/huggingface` or in `~/.cache/huggingface`
    /// - token: `HF_TOKEN`, or else the file that `HF_TOKEN_PATH` names, or else the file `token`
    ///   in `HF_HOME`, in `$XDG_CACHE_HOME/huggingface` or in `~/.cache/huggingface`; no token if
    ///   `HF_HUB_DISABLE_IMPLICIT_TOKEN` is `1`, `on`, `yes` or `true`
    /// - hub: `HF_ENDPOINT`
    /// - offline: if `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE` is `1`, `on`, `yes` or `true`
    ///
    /// # Errors
    /// [`HubError::NoCache`] if none of the variables of the cache is set and the home folder is
    /// unknown; [`FileError::Io`] if the token file cannot be read.
    pub fn from_env() -> Result<Self> {
        let variable = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        let is_set = |name: &str| {
            let value = variable(name).unwrap_or_default().to_lowercase();
            ["1", "on", "yes", "true"].contains(&value.as_str())
        };
        let home = huggingface_home();
        let in_home = |name: &str| home.as_ref().map(|home| home.join(name));
        let cache = path_variable("HF_HUB_CACHE");
        let cache = cache.or_else(|| path_variable("HUGGINGFACE_HUB_CACHE"));
        let cache = cache.or_else(|| in_home("hub")).ok_or(Error::Hub(HubError::NoCache))?;
        let token = match variable("HF_TOKEN") {
            Some(token) => Some(token),
            None => match path_variable("HF_TOKEN_PATH").or_else(|| in_home("token")) {
                Some(path) => read_token(&path)?,
                None => None,
            },
        };
        let token = token.map(|token| token.trim().to_string()).filter(|token| !token.is_empty());
        let hub = Self::new(cache)
            .with_endpoint(variable("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_string()))
            .offline(is_set("HF_HUB_OFFLINE") || is_set("TRANSFORMERS_OFFLINE"));
        Ok(match token {
            Some(token) if !is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN") => hub.with_token(token),
            _ => hub,
        })
    }

    /// Uses the hub at this URL instead of the public hub.
    pub fn with_endpoint(self, endpoint: impl Into<String>) -> Self {
        Self { endpoint: Endpoint(endpoint.into().trim_end_matches('/').to_string()), ..self }
    }

    /// Sends an access token to the hub. It is never sent to another host.
    pub fn with_token(self, token: impl Into<String>) -> Self {
        Self { token: Some(Token(token.into())), ..self }
    }

    /// Sends no access token to the hub.
    pub fn without_token(self) -> Self {
        Self { token: None, ..self }
    }

    /// Stores the files in another folder.
    pub fn with_cache(self, cache: impl Into<PathBuf>) -> Self {
        Self { cache: Cache::new(cache.into()), ..self }
    }

    /// Sets whether to use only the cache, without network access.
    pub fn offline(self, offline: bool) -> Self {
        Self { offline, ..self }
    }

    /// Whether only the cache is used.
    pub fn is_offline(&self) -> bool {
        self.offline
    }

    /// Calls `progress` during each download.
    pub fn with_progress(
        self,
        progress: impl Fn(DownloadProgress) + Send + Sync + 'static,
    ) -> Self {
        Self { progress: Progress(Some(Arc::new(progress))), ..self }
    }

    /// The files of the model `org/name`, or of `org/name@revision`, where the revision is a
    /// branch, a tag or a commit. A file is downloaded when it is first read.
    ///
    /// A cached branch is not checked for updates. In offline mode, or if the first request does
    /// not reach the hub and the commit is cached, only the cache is used: an uncached optional
    /// file counts as missing, as in `huggingface_hub`; an uncached required file is
    /// [`HubError::Offline`]. If the hub has answered a request, a later request that fails is
    /// [`HubError::Fetch`].
    ///
    /// Downloads block the thread. They need no asynchronous runtime; in an asynchronous program,
    /// read the files on a thread that may block.
    ///
    /// # Errors
    /// [`HubError::ModelId`] if `id` does not have one of these forms; [`HubError::Endpoint`] if
    /// the hub's URL does not start with `https://` or `http://`; [`HubError::Token`] if the token
    /// has a character that is not a visible ASCII character. In offline mode the URL and the token
    /// are not checked.
    pub fn model(&self, id: &str) -> Result<ModelFiles> {
        let (name, revision) = id.split_once('@').unwrap_or((id, MAIN));
        let is_valid = |part: &str| {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            !part.is_empty() && part.chars().all(is_plain) && !part.starts_with('.')
        };
        let parts: Vec<&str> = name.split('/').collect();
        let is_name = matches!(parts[..], [org, name] if is_valid(org) && is_valid(name));
        if !is_name || name.contains("--") || !revision.split('/').all(is_valid) {
            return Err(HubError::ModelId { got: id.to_string() }.into());
        }
        if !self.offline {
            let Endpoint(endpoint) = &self.endpoint;
            if !["https://", "http://"].iter().any(|scheme| endpoint.starts_with(scheme)) {
                return Err(HubError::Endpoint { got: without_credentials(endpoint) }.into());
            }
            let is_visible = |c: char| c.is_ascii_graphic();
            if self.token.as_ref().is_some_and(|Token(token)| !token.chars().all(is_visible)) {
                return Err(HubError::Token.into());
            }
        }
        let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build();
        let agent = Agent::config_builder()
            .tls_config(tls)
            .https_only(self.endpoint.0.starts_with("https://"))
            .http_status_as_error(false)
            .max_redirects(0) // `request` follows redirects, without the token
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(READ_TIMEOUT))
            .timeout_per_read(Some(READ_TIMEOUT))
            .user_agent(concat!("encodle/", env!("CARGO_PKG_VERSION")))
            .build()
            .into();
        let revision = revision.to_string();
        let repo = Repo::with_revision(name.to_string(), RepoType::Model, revision.clone());
        let folder = self.cache.path().join(repo.folder_name());
        let (hub, id, commit) = (self.clone(), name.to_string(), OnceLock::new());
        let (failure, reached) = (Mutex::new(None), AtomicBool::new(false));
        let model = HubModel { hub, id, revision, folder, commit, agent, failure, reached };
        Ok(ModelFiles::remote(model))
    }
}

/// A model on the hub.
#[derive(Debug)]
struct HubModel {
    hub: Hub,
    id: String,
    revision: String,
    /// The model's folder in the cache.
    folder: PathBuf,
    /// The commit of the revision, once it is known. All files are of this commit.
    commit: OnceLock<String>,
    agent: Agent,
    /// The cause, if the last request or download failed in all its attempts. Further ones are then
    /// attempted only once.
    failure: Mutex<Option<String>>,
    /// Whether the hub has answered a request, other than with a status of a transient failure.
    reached: AtomicBool,
}

/// The hub's metadata of a file.
struct Metadata {
    commit: String,
    etag: String,
    size: u64,
}

/// Outcome of one request or download attempt.
enum Attempt<T> {
    Done(T),
    /// A transient failure, and the wait that the server requests before the next attempt.
    Retry(String, Duration),
    /// A transient failure of an attempt that downloaded further than all earlier attempts.
    RetryWithProgress(String),
}

/// A transient failure, after which the server requests no wait.
fn retry<T>(what: impl ToString) -> Attempt<T> {
    Attempt::Retry(what.to_string(), Duration::ZERO)
}

impl RemoteFiles for HubModel {
    fn id(&self) -> &str {
        &self.id
    }

    /// The path in the cache. The result is also `None` if only the cache is used, the commit is
    /// known, and the file is not in the cache.
    ///
    /// # Errors
    /// [`HubError::Offline`] if only the cache is used and the commit is not known; the errors of
    /// [`Self::metadata`] and [`Self::fetch`].
    fn get(&self, file: &str) -> Result<Option<PathBuf>> {
        let commit = self.cached_commit();
        if let Some(commit) = &commit {
            let pointer = self.pointer(commit, file);
            if pointer.exists() {
                return Ok(Some(pointer));
            }
            if self.is_offline() || self.no_exist_marker(commit, file).exists() {
                return Ok(None);
            }
        }
        if self.is_offline() {
            return Err(self.offline(file));
        }
        let metadata = match self.metadata(file) {
            Ok(Some(metadata)) => metadata,
            Ok(None) => return Ok(None),
            // The cached files may suffice.
            Err(Error::Hub(HubError::Fetch { .. })) if commit.is_some() && self.is_offline() => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let pointer = self.pointer(&metadata.commit, file);
        self.fetch(file, &metadata)?;
        self.link(&metadata.etag, &pointer).map_err(|error| cache_error(&pointer, error))?;
        Ok(Some(pointer))
    }

    fn not_found_error(&self, file: &str) -> Option<Error> {
        let is_absent = |commit: String| self.no_exist_marker(&commit, file).exists();
        (self.is_offline() && !self.cached_commit().is_some_and(is_absent))
            .then(|| self.offline(file))
    }
}

impl HubModel {
    /// Whether only the cache is used: in offline mode, or if the hub is unreachable and has not
    /// answered any request. Once it has answered, a failed request is an error: otherwise, an
    /// optional file that could not be downloaded would silently count as missing.
    fn is_offline(&self) -> bool {
        self.hub.offline || (self.failure().is_some() && !self.reached.load(Relaxed))
    }

    fn failure(&self) -> MutexGuard<'_, Option<String>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn offline(&self, file: &str) -> Error {
        let cache = self.hub.cache.path().display().to_string();
        let (id, file, cause) = (self.id.clone(), file.to_string(), self.failure().clone());
        Error::Hub(HubError::Offline { id, file, cache, cause })
    }

    /// The commit of the revision, if it is known without a request.
    fn cached_commit(&self) -> Option<String> {
        if is_commit(&self.revision) {
            return Some(self.revision.clone());
        }
        self.commit.get().cloned().or_else(|| {
            let commit = fs::read_to_string(self.ref_path()).ok()?.trim().to_string();
            is_commit(&commit).then(|| self.commit.get_or_init(|| commit).clone())
        })
    }

    fn ref_path(&self) -> PathBuf {
        self.folder.join("refs").join(&self.revision)
    }

    fn pointer(&self, commit: &str, file: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit).join(file)
    }

    /// The marker file that records that a commit lacks a file.
    fn no_exist_marker(&self, commit: &str, file: &str) -> PathBuf {
        self.folder.join(".no_exist").join(commit).join(file)
    }

    fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    fn url(&self, file: &str) -> String {
        let escaped = |part: &str| utf8_percent_encode(part, ESCAPED).to_string();
        let revision = escaped(&self.cached_commit().unwrap_or_else(|| self.revision.clone()));
        let file: Vec<String> = file.split('/').map(escaped).collect();
        format!("{}/{}/resolve/{revision}/{}", self.hub.endpoint.0, self.id, file.join("/"))
    }

    /// A URL of the hub without the credentials of the endpoint.
    fn shown(&self, url: &str) -> String {
        let Endpoint(endpoint) = &self.hub.endpoint;
        match url.strip_prefix(endpoint.as_str()) {
            Some(path) => without_credentials(endpoint) + path,
            None => url.to_string(),
        }
    }

    fn fetch_error(&self, url: &str, what: String) -> Error {
        Error::Hub(HubError::Fetch { url: self.shown(url), what })
    }

    /// Requests a file's commit, hash and length from the hub; `None` if the model lacks the file.
    /// Records the commit in the cache; if the commit lacks the file, records this too.
    fn metadata(&self, file: &str) -> Result<Option<Metadata>> {
        let (requested, url) = (self.cached_commit(), self.url(file));
        let response = self.with_retries(&url, || self.request("HEAD", &url, 0))?;
        let header = |name: &str| response.headers().get(name).and_then(|v| v.to_str().ok());
        let commit = header("x-repo-commit").filter(|commit| is_commit(commit));
        if let Some(commit) = commit {
            if is_commit(&self.revision) && self.revision != commit {
                let what =
                    format!("the response is for commit {commit}: expected {}", self.revision);
                return Err(self.fetch_error(&url, what));
            }
            let held = self.commit.get_or_init(|| commit.to_string());
            if held != commit && requested.as_ref() != Some(held) {
                return self.metadata(file); // at the commit of the other files
            }
            self.record_commit(commit);
        }
        let status = response.status().as_u16();
        let id = || self.id.clone();
        let endpoint = || without_credentials(&self.hub.endpoint.0);
        match (status, header("x-error-code")) {
            (200..=399, _) => {}
            (404, Some("EntryNotFound")) | (404, None) if commit.is_some() => {
                // A failed write is ignored: a read-only cache may have all files that are needed.
                let _ = create(&self.no_exist_marker(commit.unwrap_or_default(), file));
                return Ok(None);
            }
            (404, Some("EntryNotFound")) => return Ok(None),
            (404, Some("RevisionNotFound")) => {
                return Err(
                    HubError::NoRevision { id: id(), revision: self.revision.clone() }.into()
                );
            }
            (403, _) | (_, Some("GatedRepo")) => {
                return Err(HubError::Gated { id: id(), endpoint: endpoint() }.into());
            }
            (401 | 404, _) => {
                return Err(HubError::NoModel { id: id(), endpoint: endpoint() }.into());
            }
            _ => {
                let what = format!("the server responded with status {status}");
                return Err(self.fetch_error(&url, what));
            }
        }
        let etag = header("x-linked-etag").or(header("etag")).map(strip_etag);
        let (Some(etag), Some(commit)) = (etag.filter(|etag| is_file_name(etag)), commit) else {
            let what = "the response has no valid ETag or X-Repo-Commit header".to_string();
            return Err(self.fetch_error(&url, what));
        };
        let size = match status {
            200 => header("x-linked-size").or(header("content-length")),
            _ => header("x-linked-size"), // content-length is that of the redirect
        };
        let Some(size) = size.and_then(|size| size.parse().ok()) else {
            let what = "the response has no valid X-Linked-Size or Content-Length header";
            return Err(self.fetch_error(&url, what.to_string()));
        };
        Ok(Some(Metadata { commit: commit.to_string(), etag: etag.to_string(), size }))
    }

    /// Records the revision's commit in the cache, if the cache can be written.
    fn record_commit(&self, commit: &str) {
        let path = self.ref_path();
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

    /// Downloads a file to its blob, unless the blob exists.
    fn fetch(&self, file: &str, metadata: &Metadata) -> Result<()> {
        let (url, blob) = (self.url(file), self.blob(&metadata.etag));
        let failed = |error| cache_error(&blob, error);
        // The lock excludes other processes, including Python's.
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
            let mut longest = 0;
            self.with_retries(&url, || {
                let attempt = self.fetch_rest(file, &url, metadata, &mut to)?;
                let len = to.metadata().map_err(failed)?.len();
                let progressed = len > longest;
                longest = longest.max(len);
                Ok(match attempt {
                    Attempt::Retry(what, _) if progressed => Attempt::RetryWithProgress(what),
                    attempt => attempt,
                })
            })?;
            match verify(&mut to, metadata).map_err(failed)? {
                Ok(()) => break,
                // An earlier run left a wrong partial file: download the whole file again.
                Err(_) if std::mem::take(&mut resumed) => to.set_len(0).map_err(failed)?,
                Err((expected, got)) => {
                    fs::remove_file(&partial).map_err(failed)?;
                    let url = self.shown(&url);
                    return Err(HubError::WrongFile { url, expected, got }.into());
                }
            }
        }
        to.sync_all().and_then(|()| fs::rename(&partial, &blob)).map_err(failed)
    }

    /// Downloads the part of a file that is missing from `to`.
    fn fetch_rest(
        &self,
        file: &str,
        url: &str,
        metadata: &Metadata,
        to: &mut File,
    ) -> Result<Attempt<()>> {
        let failed = |error| cache_error(&self.blob(&metadata.etag), error);
        let mut start = to.seek(io::SeekFrom::End(0)).map_err(failed)?;
        if metadata.size == start && start > 0 {
            return Ok(Attempt::Done(()));
        }
        if metadata.size < start {
            to.set_len(0).map_err(failed)?;
            start = to.seek(io::SeekFrom::Start(0)).map_err(failed)?;
        }
        let response = match self.request("GET", url, start)? {
            Attempt::Done(response) => response,
            Attempt::Retry(what, wait) => return Ok(Attempt::Retry(what, wait)),
            Attempt::RetryWithProgress(what) => return Ok(Attempt::RetryWithProgress(what)),
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
                return Ok(retry("the download cannot be resumed"));
            }
            status => {
                let what = format!("the server responded with status {status}");
                return Err(self.fetch_error(url, what));
            }
        }
        // One byte beyond the expected length suffices to detect a wrong file.
        let limit = (metadata.size - start).saturating_add(1);
        let mut body = response.into_body().into_reader().take(limit);
        let mut bytes = vec![0; 1 << 16];
        loop {
            match body.read(&mut bytes) {
                Ok(0) => break,
                Ok(n) => {
                    to.write_all(&bytes[..n]).map_err(failed)?;
                    start += n as u64;
                    if let Some(progress) = &self.hub.progress.0 {
                        progress(DownloadProgress { file, bytes: start, total: metadata.size });
                    }
                }
                Err(error) => return Ok(retry(error)),
            }
        }
        if start < metadata.size {
            Ok(retry("the connection was closed early"))
        } else {
            Ok(Attempt::Done(()))
        }
    }

    /// Repeats an attempt until it succeeds, or until [`ATTEMPTS`] consecutive attempts have
    /// failed. An attempt is not repeated after another `failure`.
    fn with_retries<T>(
        &self,
        url: &str,
        mut attempt: impl FnMut() -> Result<Attempt<T>>,
    ) -> Result<T> {
        let mut failures = 0;
        loop {
            let (what, wait) = match attempt()? {
                Attempt::Done(done) => {
                    *self.failure() = None;
                    return Ok(done);
                }
                Attempt::RetryWithProgress(what) => {
                    failures = 0;
                    (what, Duration::ZERO)
                }
                Attempt::Retry(what, wait) => (what, wait),
            };
            failures += 1;
            if failures == ATTEMPTS || self.failure().is_some() {
                *self.failure() = Some(what.clone());
                return Err(self.fetch_error(url, format!("{what}; try again later")));
            }
            thread::sleep(wait.max(FIRST_WAIT * 2u32.pow(failures - 1)));
        }
    }

    /// Requests a file from byte `start` on, and follows redirects. A HEAD request stops at the
    /// first response with the metadata (`X-Linked-ETag`).
    fn request(&self, method: &str, url: &str, start: u64) -> Result<Attempt<Response<Body>>> {
        let mut uri: Uri = url.parse().map_err(|e| self.fetch_error(url, format!("{e}")))?;
        let hub_origin = origin(&uri);
        for _ in 0..=MAX_REDIRECTS {
            let proxy = self.agent.config().proxy().filter(|proxy| !proxy.is_no_proxy(&uri));
            if let Some(proxy) = proxy.filter(|proxy| !is_http(proxy)) {
                let what = format!(
                    "the proxy {} is not supported: expected http:// or https:// in ALL_PROXY, \
                     HTTPS_PROXY or HTTP_PROXY",
                    shown_proxy(proxy)
                );
                return Err(self.fetch_error(url, what));
            }
            let mut request = match method {
                "HEAD" => self.agent.head(&uri),
                _ => self.agent.get(&uri),
            };
            request = request.header("accept-encoding", "identity");
            if let Some(Token(token)) =
                self.hub.token.as_ref().filter(|_| origin(&uri) == hub_origin)
            {
                request = request.header(AUTHORIZATION, format!("Bearer {token}"));
            }
            if start > 0 {
                request = request.header("range", format!("bytes={start}-"));
            }
            let response = match request.call() {
                Ok(response) => response,
                Err(
                    failed @ (ureq::Error::BadUri(_)
                    | ureq::Error::Tls(_)
                    | ureq::Error::RequireHttpsOnly(_)),
                ) => {
                    return Err(self.fetch_error(url, cause(&failed, &uri, proxy)));
                }
                Err(failed) => return Ok(retry(cause(&failed, &uri, proxy))),
            };
            let status = response.status();
            if [408, 429, 500, 502, 503, 504].contains(&status.as_u16()) {
                let after = response.headers().get("retry-after").and_then(|v| v.to_str().ok());
                let wait = after.and_then(|after| after.parse().ok()).map(Duration::from_secs);
                let wait = wait.unwrap_or_default().min(MAX_RETRY_AFTER);
                let what = format!("the server responded with status {}", status.as_u16());
                return Ok(Attempt::Retry(what, wait));
            }
            self.reached.store(true, Relaxed);
            let has_metadata = method == "HEAD" && response.headers().contains_key("x-linked-etag");
            if !status.is_redirection() || has_metadata {
                return Ok(Attempt::Done(response));
            }
            let location = response.headers().get("location").and_then(|l| l.to_str().ok());
            let Some(next) = location.and_then(|location| resolve_redirect(&uri, location)) else {
                return Err(self.fetch_error(url, "the redirect has no valid location".to_string()));
            };
            uri = next;
        }
        Err(self.fetch_error(
            url,
            format!("the request was redirected more than {MAX_REDIRECTS} times"),
        ))
    }

    /// Links a file of a snapshot to its blob; copies it where symlinks are not available.
    fn link(&self, etag: &str, pointer: &Path) -> io::Result<()> {
        if let Some(folder) = pointer.parent() {
            fs::create_dir_all(folder)?;
        }
        #[cfg(unix)]
        {
            let depth =
                pointer.strip_prefix(&self.folder).map_or(0, |p| p.components().count() - 1);
            let mut target: PathBuf = std::iter::repeat_n("..", depth).collect();
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

/// The cause of a failed request for `uri`, which was sent through `proxy`: which of them failed,
/// and how.
fn cause(error: &ureq::Error, uri: &Uri, proxy: Option<&Proxy>) -> String {
    let what = match error {
        ureq::Error::Io(error) => error.to_string(), // refused, an unknown name, a certificate
        ureq::Error::ConnectProxyFailed(what) => what.clone(),
        ureq::Error::Timeout(Timeout::Connect) => {
            format!("no connection within {} s", CONNECT_TIMEOUT.as_secs())
        }
        ureq::Error::Timeout(_) => format!("no response within {} s", READ_TIMEOUT.as_secs()),
        other => other.to_string(),
    };
    match proxy {
        Some(proxy) => format!(
            "the request through the proxy {} (ALL_PROXY, HTTPS_PROXY or HTTP_PROXY) failed: {what}",
            shown_proxy(proxy)
        ),
        None => {
            let port = uri.port().map_or(String::new(), |port| format!(":{port}"));
            format!("the request to {}{port} failed: {what}", uri.host().unwrap_or_default())
        }
    }
}

/// Whether requests can be sent through a proxy. The crate `ureq` ignores a SOCKS proxy here.
fn is_http(proxy: &Proxy) -> bool {
    matches!(proxy.protocol(), ProxyProtocol::Http | ProxyProtocol::Https)
}

/// The URL of a proxy without its credentials.
fn shown_proxy(proxy: &Proxy) -> String {
    without_credentials(proxy.uri().to_string().trim_end_matches('/'))
}

/// Opens a file for reading and writing, and creates it and its folder if necessary.
fn create(path: &Path) -> io::Result<File> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}

/// Compares a file's length and hash with the hub's metadata. A mismatch is `Err((expected, got))`.
/// The hash is the file's SHA-256, or the SHA-1 of its git blob, depending on the ETag's length. If
/// the ETag is not such a hash, only the length is compared.
fn verify(
    file: &mut File,
    metadata: &Metadata,
) -> io::Result<std::result::Result<(), (String, String)>> {
    let len = file.metadata()?.len();
    if metadata.size != len {
        return Ok(Err((format!("{} bytes", metadata.size), format!("{len} bytes"))));
    }
    file.seek(io::SeekFrom::Start(0))?;
    let is_hash = metadata.etag.chars().all(|c| c.is_ascii_hexdigit());
    let (name, got) = match metadata.etag.len() {
        64 if is_hash => ("SHA-256", hash(file, Sha256::new())?),
        40 if is_hash => {
            let header = format!("blob {len}\0");
            ("git blob SHA-1", hash(file, Sha1::new_with_prefix(header))?)
        }
        _ => return Ok(Ok(())),
    };
    if got == metadata.etag {
        Ok(Ok(()))
    } else {
        Ok(Err((format!("{name} {}", metadata.etag), got)))
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

/// A hub's URL without `user:password@`. The password may contain any character.
fn without_credentials(endpoint: &str) -> String {
    let (scheme, rest) = endpoint.split_once("://").unwrap_or(("", endpoint));
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    let separator = if scheme.is_empty() { "" } else { "://" };
    format!("{scheme}{separator}{host}")
}

fn cache_error(path: &Path, source: io::Error) -> Error {
    Error::Hub(HubError::Cache { path: path.display().to_string(), source })
}

/// The content of the token file; `None` if there is no file.
fn read_token(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(token) => Ok(Some(token)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(FileError::Io { path: path.display().to_string(), source }.into()),
    }
}

fn is_commit(commit: &str) -> bool {
    commit.len() == 40 && commit.chars().all(|c| c.is_ascii_hexdigit())
}

/// An ETag without the quotes and the `W/` prefix.
fn strip_etag(etag: &str) -> &str {
    etag.trim_start_matches("W/").trim_matches('"')
}

/// Whether an ETag can be used as a file name.
fn is_file_name(etag: &str) -> bool {
    !etag.is_empty() && etag.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c))
}

/// The scheme, host and port of a URI.
fn origin(uri: &Uri) -> (Option<String>, Option<String>, Option<u16>) {
    let port = uri.port_u16().or(match uri.scheme_str() {
        Some("https") => Some(443),
        _ => Some(80),
    });
    (uri.scheme_str().map(String::from), uri.host().map(str::to_lowercase), port)
}

/// Resolves a `Location` header against the request's URI.
fn resolve_redirect(uri: &Uri, location: &str) -> Option<Uri> {
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
    fn credentials_are_removed_from_endpoints() {
        for (endpoint, shown) in [
            ("https://user:secret@host:8080", "https://host:8080"),
            ("http://user:a@b/c@host/path", "http://host/path"),
            ("user:secret@host", "host"),
            ("https://host/path", "https://host/path"),
        ] {
            assert_eq!(without_credentials(endpoint), shown);
        }
    }

    #[test]
    fn the_cause_of_a_failed_request_names_the_host_or_the_proxy() {
        let uri: Uri = "https://host:81/a/b".parse().unwrap();
        let proxy = Proxy::new("http://user:secret@proxy:8080").unwrap();
        let refused = || ureq::Error::Io(io::ErrorKind::ConnectionRefused.into());
        let timeout = |which| ureq::Error::Timeout(which);
        for (error, expected) in [
            (refused(), "connection refused"),
            (ureq::Error::HostNotFound, "host not found"),
            (timeout(Timeout::Connect), "no connection within 10 s"),
            (timeout(Timeout::RecvResponse), "no response within 60 s"),
            (ureq::Error::ConnectProxyFailed("responded 407".to_string()), "responded 407"),
        ] {
            assert_eq!(
                cause(&error, &uri, None),
                format!("the request to host:81 failed: {expected}")
            );
            assert_eq!(
                cause(&error, &uri, Some(&proxy)),
                format!(
                    "the request through the proxy http://proxy:8080 (ALL_PROXY, HTTPS_PROXY or \
                     HTTP_PROXY) failed: {expected}"
                )
            );
        }
    }

    #[test]
    fn only_valid_model_names_are_accepted() {
        let hub = Hub::new("nowhere");
        for id in ["org/name", "org/name@v1.0", "org/name@refs/pr/3", "a-b/c.d_e"] {
            assert!(hub.model(id).is_ok(), "{id}");
        }
        for id in
            ["", "name", "a/b/c", "../x", "a/..", "a/b@", "a/b@../x", "a/b c", "a--b/c", "/a/b"]
        {
            assert!(matches!(hub.model(id), Err(Error::Hub(HubError::ModelId { .. }))), "{id}");
        }
    }

    #[test]
    fn redirects_are_resolved_against_the_request() {
        let uri: Uri = "http://host:81/a/b?c".parse().unwrap();
        let to = |location| resolve_redirect(&uri, location).map(|uri| uri.to_string());
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
