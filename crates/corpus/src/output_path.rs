//! Checks an output path before the output is computed.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf, is_separator},
};

use crate::{Error, OutputError, Result};

/// The file that the output replaces or creates: `path`, or its target if `path` is a symbolic
/// link.
///
/// # Errors
/// - [`OutputError::OutputNotAFile`] for a directory, a device, a path without a file name, or `-`,
///   the usual name of standard output
/// - [`OutputError::DanglingLink`] for a symbolic link to a missing file
/// - [`OutputError::NoDirectory`] if the directory of `path` does not exist
/// - [`OutputError::Write`] if the parent of `path` is not a directory or cannot be examined, or if
///   `path` is a symbolic link whose target cannot be examined
///
/// # Examples
/// ```
/// use std::path::Path;
///
/// use corpus::{Error, OutputError};
///
/// assert_eq!(corpus::output_path(Path::new("new.npy"))?, Path::new("new.npy"));
/// let error = corpus::output_path(Path::new("missing/new.npy")).unwrap_err();
/// assert!(matches!(error, Error::Output(OutputError::NoDirectory { .. })));
/// # Ok::<(), corpus::Error>(())
/// ```
pub fn output_path(path: &Path) -> Result<PathBuf> {
    let not_a_file =
        |got| Error::Output(OutputError::OutputNotAFile { path: path.to_path_buf(), got });
    if path == Path::new("-") {
        return Err(not_a_file("standard output"));
    }
    if let Ok(found) = fs::metadata(path) {
        if !found.is_file() {
            return Err(not_a_file(if found.is_dir() {
                "a directory"
            } else {
                "not a regular file"
            }));
        }
        let resolved = if path.is_symlink() { fs::canonicalize(path) } else { Ok(path.into()) };
        return resolved.map_err(|source| {
            Error::Output(OutputError::Write { path: path.to_path_buf(), source })
        });
    }
    let unwritable =
        |source| Error::Output(OutputError::Write { path: path.to_path_buf(), source });
    if path.is_symlink() {
        return Err(match fs::metadata(path) {
            Err(source) if source.kind() != ErrorKind::NotFound => unwritable(source),
            _ => Error::Output(OutputError::DanglingLink { path: path.to_path_buf() }),
        });
    }
    let text = path.as_os_str().as_encoded_bytes();
    let names_a_folder =
        text.ends_with(b"/.") || text.last().is_some_and(|&b| is_separator(b.into()));
    if names_a_folder || path.file_name().is_none() {
        return Err(not_a_file("not a file name"));
    }
    if let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) {
        match fs::metadata(directory) {
            Ok(found) if found.is_dir() => {}
            Ok(_) => return Err(unwritable(ErrorKind::NotADirectory.into())),
            Err(source) if source.kind() == ErrorKind::NotFound => {
                return Err(OutputError::NoDirectory { path: path.to_path_buf() }.into());
            }
            Err(source) => return Err(unwritable(source)),
        }
    }
    Ok(path.to_path_buf())
}
