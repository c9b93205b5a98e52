//! The run state: a JSON file beside a temporary output, from which an interrupted run is resumed.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{Error, InputError, Result, ResumeError, records::InputPosition};

/// The version of the format. Increase it when the format changes, or when the same record would
/// get another hash. Version 8 changed the text of the settings.
const VERSION: u32 = 8;

/// The state of a run.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct RunState {
    version: u32,
    /// Everything that determines the output's bytes, apart from the records and the handling of
    /// invalid ones.
    settings: String,
    /// How far the input has been read.
    pub(crate) position: InputPosition,
    /// The number of vectors in the temporary output.
    pub(crate) written: u64,
    /// The length in bytes of the temporary output up to the last of these vectors.
    pub(crate) bytes: u64,
}

/// The format version of a run state. It is read first, because the other fields may differ between
/// versions.
#[derive(Deserialize)]
#[serde(expecting = "an object with version")]
struct StateVersion {
    version: Option<u32>,
}

impl RunState {
    /// The state of a run that has not read anything.
    pub(crate) fn new(settings: String) -> Self {
        let position = InputPosition::default();
        Self { version: VERSION, settings, position, written: 0, bytes: 0 }
    }

    /// Reads the state of an interrupted run with the same settings; `None` if the file does not
    /// exist. `partial` is the path of the temporary output, for errors.
    ///
    /// # Errors
    /// [`InputError::Read`]; [`ResumeError::DamagedRunState`]; [`ResumeError::RunStateVersion`];
    /// [`ResumeError::OtherRun`].
    pub(crate) fn read(path: &Path, partial: &Path, settings: &str) -> Result<Option<Self>> {
        let json = match fs::read(path) {
            Ok(json) => json,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => {
                return Err(InputError::Read { name: path.display().to_string(), source }.into());
            }
        };
        let path = || path.to_path_buf();
        let damaged = |source| Error::Resume(ResumeError::DamagedRunState { path: path(), source });
        let StateVersion { version: got } = serde_json::from_slice(&json).map_err(damaged)?;
        if got != Some(VERSION) {
            return Err(
                ResumeError::RunStateVersion { path: path(), expected: VERSION, got }.into()
            );
        }
        let state: Self = serde_json::from_slice(&json).map_err(damaged)?;
        if state.settings != settings {
            let (expected, got) = differences(settings, &state.settings);
            return Err(ResumeError::OtherRun { path: partial.to_path_buf(), expected, got }.into());
        }
        Ok(Some(state))
    }

    /// Writes the state to a temporary file, waits until it is on disk, and renames it to `path`,
    /// so that the file at `path` is always complete.
    ///
    /// # Errors
    /// The operating system's error.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let new = with_suffix(path, ".new");
        let mut file = File::create(&new)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        file.sync_data()?;
        fs::rename(&new, path)
    }
}

/// The parts of two settings strings that differ, separated by semicolons; all parts if the strings
/// have different numbers of parts.
fn differences(expected: &str, got: &str) -> (String, String) {
    let [one, other] = [expected, got].map(|settings| settings.split("; ").collect::<Vec<_>>());
    if one.len() != other.len() {
        return (expected.to_string(), got.to_string());
    }
    let differ = one.into_iter().zip(other).filter(|(one, other)| one != other);
    let (one, other): (Vec<&str>, Vec<&str>) = differ.unzip();
    (one.join("; "), other.join("; "))
}

/// The path with `suffix` at its end.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_run_states_and_those_of_other_versions_or_settings_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.partial.json");
        let partial = dir.path().join("out.partial");
        let read = |settings: &str| RunState::read(&path, &partial, settings);
        assert_eq!(read("a").unwrap(), None);
        let state = RunState::new("a".to_string());
        state.write(&path).unwrap();
        assert_eq!(read("a").unwrap(), Some(state));
        assert!(matches!(read("b"), Err(Error::Resume(ResumeError::OtherRun { .. }))));
        fs::write(&path, "{\"version\": 3}").unwrap();
        assert!(matches!(
            read("a"),
            Err(Error::Resume(ResumeError::RunStateVersion {
                expected: VERSION,
                got: Some(3),
                ..
            }))
        ));
        fs::write(&path, "{}").unwrap();
        assert!(matches!(
            read("a"),
            Err(Error::Resume(ResumeError::RunStateVersion { got: None, .. }))
        ));
        fs::write(&path, "{").unwrap();
        assert!(matches!(read("a"), Err(Error::Resume(ResumeError::DamagedRunState { .. }))));
    }

    #[cfg(unix)]
    #[test]
    fn a_suffix_keeps_a_path_that_is_not_utf8() {
        use std::{ffi::OsStr, os::unix::ffi::OsStrExt};

        let path = Path::new(OsStr::from_bytes(b"out\xff.npy"));
        let expected = OsStr::from_bytes(b"out\xff.npy.partial");
        assert_eq!(with_suffix(path, ".partial"), expected);
    }
}
