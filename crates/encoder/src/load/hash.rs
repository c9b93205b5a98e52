//! Hashes of weights files, and their cache.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use rayon::prelude::*;
use twox_hash::{XxHash3_64, XxHash3_128};

use super::{files::Opened, save::temporary};

/// Bytes that one thread hashes at a time.
const CHUNK: usize = 1 << 20;

/// The hash of the hashes of all chunks, computed on all threads.
pub(super) fn hash(bytes: &[u8]) -> u128 {
    let hashes: Vec<[u8; 8]> =
        bytes.par_chunks(CHUNK).map(|chunk| XxHash3_64::oneshot(chunk).to_le_bytes()).collect();
    hash_of_hashes(&hashes)
}

fn hash_of_hashes(hashes: &[[u8; 8]]) -> u128 {
    XxHash3_128::oneshot(hashes.as_flattened())
}

/// [`hash`] of the first `len` bytes of a file, without reading all of them if `folder` has their
/// hash from an earlier call. The file is recognised by its [`Opened::identity`] and the hash of a
/// sample of its content.
pub(super) fn hash_of_file(file: &Opened, len: u64, folder: &Path) -> io::Result<u128> {
    let known = match file.identity() {
        Some(identity) => Some(folder.join(format!("{identity}-{len}-{}", hash_of_sample(file)?))),
        None => None,
    };
    let read = |path: &PathBuf| u128::from_str_radix(&fs::read_to_string(path).ok()?, 16).ok();
    if let Some(hash) = known.as_ref().and_then(read) {
        return Ok(hash);
    }
    let chunks = (0..len.div_ceil(CHUNK as u64)).into_par_iter().map(|i| {
        let start = i * CHUNK as u64;
        let chunk = file.at(start, (len - start).min(CHUNK as u64) as usize)?;
        Ok(XxHash3_64::oneshot(&chunk).to_le_bytes())
    });
    let hash = hash_of_hashes(&chunks.collect::<io::Result<Vec<_>>>()?);
    if let Some(path) = known.filter(|_| !file.is_recent()) {
        // If this write fails, the next process computes the hash again.
        let _ = write_hash(&path, hash);
    }
    Ok(hash)
}

/// Hashes a sample of the file: 16 blocks at equal distances.
fn hash_of_sample(file: &Opened) -> io::Result<u64> {
    const BLOCKS: u64 = 16;
    const BLOCK: u64 = 4096;
    let mut sample = vec![];
    for i in 0..BLOCKS {
        let start = file.len() / BLOCKS * i;
        sample.extend_from_slice(&file.at(start, (file.len() - start).min(BLOCK) as usize)?);
    }
    Ok(XxHash3_64::oneshot(&sample))
}

fn write_hash(path: &Path, hash: u128) -> io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(dir)?;
    let mut file = temporary(dir)?;
    write!(file, "{hash:032x}")?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelFiles;

    #[test]
    fn a_file_and_its_bytes_have_the_same_hash() -> io::Result<()> {
        let bytes: Vec<u8> = (0..CHUNK * 2 + 7).map(|i| (i * 31 % 251) as u8).collect();
        let dir = tempfile::tempdir()?;
        fs::write(dir.path().join("weights"), &bytes)?;
        let file = ModelFiles::dir(dir.path()).unwrap().open("weights").unwrap().unwrap();
        let hashes = dir.path().join("hashes");
        for len in [bytes.len(), CHUNK + 3] {
            assert_eq!(hash_of_file(&file, len as u64, &hashes)?, hash(&bytes[..len]));
        }
        assert_ne!(hash(&bytes), hash(&bytes[1..]));
        Ok(())
    }
}
