//! Locates the tensors in a file that `torch.save` wrote: a zip archive, or a sequence of pickles
//! as before PyTorch 1.6.
//!
//! The pickle interpreter supports only the opcodes that a dictionary of tensors needs. It records
//! calls as data and never executes them.
//! <https://docs.python.org/3/library/pickletools.html>, `torch/serialization.py`.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
    io::{BufReader, Cursor, Read, Seek},
};

use safetensors::Dtype;
use zip::{CompressionMethod, ZipArchive, result::ZipError};

use super::{
    files::Opened,
    tensor_info::{TensorInfo, TensorInfos},
};
use crate::error::beginning;

/// Maximum total length of a file's pickles in bytes.
const MAX_PICKLE: u64 = 10_000_000;

/// Maximum number of dimensions of a tensor.
const MAX_RANK: usize = 8;

/// Maximum total size of all tensors, as a multiple of the file's length. It limits how often
/// tensors may share a storage, as tied weights do.
const MAX_SHARING: u64 = 4;

/// Maximum total number of opcodes of a file's pickles. Each opcode adds at most one value. A state
/// dictionary has about 50 opcodes per tensor.
const MAX_OPCODES: usize = 1 << 21;

/// The beginning of a zip archive.
const ZIP: &[u8] = b"PK\x03\x04";

/// The beginning of a file from before PyTorch 1.6: `torch.serialization.MAGIC_NUMBER`, pickled.
const MAGIC: &[u8] = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.";

/// `Result` with the reason why a file cannot be read.
type Result<T> = std::result::Result<T, String>;

/// Whether `torch.save` may have written a file, by its first bytes.
pub(super) fn is_pickled(file: &Opened) -> std::io::Result<bool> {
    let longest = ZIP.len().max(MAGIC.len());
    let first_bytes = file.at(0, file.len().min(longest as u64) as usize)?;
    Ok(first_bytes.starts_with(ZIP) || first_bytes.starts_with(MAGIC))
}

/// Locates the tensors of a file that `torch.save` wrote.
pub(super) fn tensors(file: &Opened) -> Result<TensorInfos> {
    let magic = read(file, 0, file.len().min(MAGIC.len() as u64))?;
    if *magic == *MAGIC { legacy(file) } else { archive(file) }
}

fn read(file: &Opened, start: u64, len: u64) -> Result<Cow<'_, [u8]>> {
    file.at(start, len as usize).map_err(|error| error.to_string())
}

/// The offset and the length in bytes of a storage or of an archive's member.
type Extent = (u64, u64);

fn archive(file: &Opened) -> Result<TensorInfos> {
    let extents = match file {
        Opened::File { file, .. } => extents(BufReader::new(file)),
        Opened::Bytes(bytes) => extents(Cursor::new(&bytes[..])),
    };
    let extents = extents.map_err(|error| error.to_string())?;
    let extent = |name: &str| {
        let &(start, len) = extents.get(name)?;
        let end = start.checked_add(len);
        end.is_some_and(|end| end <= file.len()).then_some((start, len))
    };
    let mut pickles = extents.keys().filter_map(|name| name.strip_suffix("data.pkl"));
    let (Some(folder), None) = (pickles.next(), pickles.next()) else {
        return Err("expected exactly one uncompressed data.pkl".to_string());
    };
    let Some((start, len)) = extent(&format!("{folder}data.pkl")) else {
        return Err("data.pkl extends beyond the end of the file".to_string());
    };
    if len > MAX_PICKLE {
        return Err(format!("data.pkl has {len} bytes: expected at most {MAX_PICKLE}"));
    }
    if let Some((start, len)) = extent(&format!("{folder}byteorder"))
        && *read(file, start, len.min(6))? != *b"little"
    {
        return Err("expected little-endian values".to_string());
    }
    let bytes = read(file, start, len)?;
    let mut pickle = Pickle::new(&bytes);
    let root = pickle.run()?;
    pickle.tensors(root)?.locate(file.len(), |key| extent(&format!("{folder}data/{key}")))
}

/// The uncompressed members of an archive. PyTorch writes no others.
fn extents(file: impl Read + Seek) -> std::result::Result<BTreeMap<String, Extent>, ZipError> {
    let mut archive = ZipArchive::new(file)?;
    let mut extents = BTreeMap::new();
    for i in 0..archive.len() {
        let file = archive.by_index_raw(i)?;
        if let (CompressionMethod::Stored, false, Some(start)) =
            (file.compression(), file.encrypted(), file.data_start())
        {
            extents.insert(file.name()?.into_owned(), (start, file.size()));
        }
    }
    Ok(extents)
}

/// Reads the format from before PyTorch 1.6: five pickles (magic number, version, system, tensors,
/// order of the storages), then each storage's number of values as u64 and its values.
fn legacy(file: &Opened) -> Result<TensorInfos> {
    let bytes = read(file, 0, file.len().min(MAX_PICKLE))?;
    let mut pickle = Pickle::new(&bytes);
    for _magic_and_version in 0..2 {
        pickle.run()?;
    }
    let system = pickle.run()?;
    if let Some(Node::Dict(items)) = pickle.node(system)
        && items.chunks_exact(2).any(|item| {
            pickle.is_text(item[0], &["little_endian"]) && matches!(item[1], Value::False)
        })
    {
        return Err("expected little-endian values".to_string());
    }
    let root = pickle.run()?;
    let found = pickle.tensors(root)?;
    // The order names the storages of all tensors in the file, including those of an optimizer.
    let storages = pickle.storages();
    let order = pickle.run()?;
    let mut start = pickle.at as u64;
    let mut extents = HashMap::new();
    for &key in pickle.list(order)? {
        let key = pickle.text(key)?;
        let shown = beginning(key);
        let Some(&(dtype, values)) = storages.get(key) else {
            return Err(format!("storage {shown:?} has an unsupported dtype or no length"));
        };
        let end_of = |start: u64| start.checked_add(values.checked_mul(size_of(dtype))?);
        let data = start.saturating_add(8);
        let Some(end) = end_of(data).filter(|&end| end <= file.len()) else {
            return Err(format!("storage {shown:?} extends beyond the end of the file"));
        };
        if *read(file, start, 8)? != values.to_le_bytes() {
            return Err(format!("storage {shown:?} does not have {values} values"));
        }
        extents.insert(key, (data, end - data));
        start = end;
    }
    found.locate(file.len(), |key| extents.get(key).copied())
}

fn size_of(dtype: Dtype) -> u64 {
    dtype.bitsize() as u64 / 8
}

/// The tensors of a pickle, whose storages are not located yet.
#[derive(Default)]
struct PickledTensors<'a> {
    tensors: BTreeMap<&'a str, View<'a>>,
    storages: Storages<'a>,
}

/// Dtype and number of values of storages, by their keys.
type Storages<'a> = BTreeMap<&'a str, (Dtype, u64)>;

/// A tensor's view of a storage. Offset and strides are in elements.
struct View<'a> {
    storage: &'a str,
    offset: u64,
    shape: Vec<u64>,
    strides: Vec<u64>,
}

impl PickledTensors<'_> {
    /// Locates the tensors in a file of `len` bytes. `storage_extent` locates a storage by its key.
    fn locate(
        self,
        len: u64,
        storage_extent: impl Fn(&str) -> Option<Extent>,
    ) -> Result<TensorInfos> {
        let mut room = len.saturating_mul(MAX_SHARING);
        let tensors = self.tensors.into_iter().map(|(name, view)| {
            let (shown, (dtype, values)) = (beginning(name), self.storages[view.storage]);
            let size = size_of(dtype);
            let Some((start, len)) = storage_extent(view.storage) else {
                return Err(format!("the storage of tensor {shown:?} is missing"));
            };
            if values.checked_mul(size) != Some(len) {
                return Err(format!(
                    "the storage of tensor {shown:?} does not have {values} values"
                ));
            }
            let (Some(elements), Some(span)) = (view.elements(), view.span()) else {
                return Err(format!("the size of tensor {shown:?} overflows"));
            };
            let fits = view.offset.checked_add(span).is_some_and(|end| end <= values);
            // A tensor with more elements than its storage (an expanded one) is rejected, so that a
            // small file cannot ask for much memory.
            if !fits || elements > values {
                return Err(format!("tensor {shown:?} is larger than its storage"));
            }
            room = room.checked_sub(elements * size).ok_or_else(|| {
                format!("the tensors have more than {MAX_SHARING} times the bytes of the file")
            })?;
            let (start, end) = (start + view.offset * size, (view.offset + span) * size + start);
            let as_usize = |sizes: &[u64]| sizes.iter().map(|&n| n as usize).collect::<Vec<_>>();
            let strides = (!view.is_contiguous()).then(|| as_usize(&view.strides));
            let shape = as_usize(&view.shape);
            Ok((name.to_string(), TensorInfo { dtype, shape, start, end, strides }))
        });
        tensors.collect()
    }
}

impl View<'_> {
    fn elements(&self) -> Option<u64> {
        self.shape.iter().try_fold(1u64, |n, &size| n.checked_mul(size))
    }

    /// Number of storage values from the first to the last element, inclusive.
    fn span(&self) -> Option<u64> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let mut dims = self.shape.iter().zip(&self.strides);
        let last = dims
            .try_fold(0u64, |n, (size, stride)| n.checked_add((size - 1).checked_mul(*stride)?));
        last?.checked_add(1)
    }

    /// Whether the elements are contiguous in row-major order.
    fn is_contiguous(&self) -> bool {
        let mut expected = 1u64;
        self.shape.iter().zip(&self.strides).rev().all(|(&size, &stride)| {
            let is_expected = size <= 1 || stride == expected;
            expected = expected.saturating_mul(size.max(1));
            is_expected
        })
    }
}

/// A value on the stack. Compound values are indices of [`Node`]s, so that dropping a deeply nested
/// pickle does not recurse.
#[derive(Clone, Copy, Debug)]
enum Value {
    Mark,
    False,
    /// None, True, a float or an integer of more than 8 bytes. No tensor's location depends on it.
    Other,
    Int(i64),
    Node(usize),
}

#[derive(Debug)]
enum Node<'a> {
    Text(&'a str),
    /// A module and the name of one of its items.
    Global(&'a str, &'a str),
    Tuple(Vec<Value>),
    List(Vec<Value>),
    /// Alternating keys and values.
    Dict(Vec<Value>),
    /// A function and its arguments. The call is not executed.
    Call(Value, Value),
    /// A persistent id: a reference to an object outside the pickle.
    Persistent(Value),
}

/// An interpreter for a pickle's opcodes.
struct Pickle<'a> {
    bytes: &'a [u8],
    at: usize,
    stack: Vec<Value>,
    memo: HashMap<u32, Value>,
    nodes: Vec<Node<'a>>,
    /// The number of opcodes so far.
    opcodes: usize,
    /// Number of pairs that [`Self::call`] may still copy. The limit keeps the memory proportional
    /// to the pickle's length.
    pairs_left: usize,
}

impl<'a> Pickle<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            at: 0,
            stack: vec![],
            memo: HashMap::new(),
            nodes: vec![],
            opcodes: 0,
            pairs_left: bytes.len(),
        }
    }

    /// Interprets one pickle, and returns its result.
    fn run(&mut self) -> Result<Value> {
        self.stack.clear();
        self.memo.clear();
        loop {
            let at = self.at;
            let result = self.step().map_err(|e| format!("{e} at byte {at} of the pickle"))?;
            if let Some(value) = result {
                return Ok(value);
            }
            self.opcodes += 1;
            if self.opcodes > MAX_OPCODES {
                return Err(format!("the pickle has more than {MAX_OPCODES} opcodes"));
            }
        }
    }

    fn step(&mut self) -> Result<Option<Value>> {
        match self.take(1)?[0] {
            0x80 => drop(self.take(1)?), // PROTO
            0x95 => drop(self.take(8)?), // FRAME
            b'.' => return Ok(Some(self.pop()?)),
            b'(' => self.stack.push(Value::Mark),
            b'N' | 0x88 => self.stack.push(Value::Other),
            0x89 => self.stack.push(Value::False),
            b'G' => {
                self.take(8)?; // BINFLOAT
                self.stack.push(Value::Other);
            }
            b'K' => self.int(1)?,
            b'M' => self.int(2)?,
            b'J' => {
                let bytes = self.array::<4>()?;
                self.stack.push(Value::Int(i32::from_le_bytes(bytes).into()));
            }
            0x8a => self.long1()?,
            b'X' | b'T' => {
                let len = u32::from_le_bytes(self.array()?);
                self.push_text(len as usize)?;
            }
            0x8c | b'U' => {
                let len = self.take(1)?[0];
                self.push_text(len.into())?;
            }
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push(Node::Global(module, name));
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                let global = Node::Global(self.text(module)?, self.text(name)?);
                self.push(global);
            }
            b')' => self.push(Node::Tuple(vec![])),
            0x85 => self.tuple(1)?,
            0x86 => self.tuple(2)?,
            0x87 => self.tuple(3)?,
            b't' => {
                let items = self.pop_to_mark()?;
                self.push(Node::Tuple(items));
            }
            b']' => self.push(Node::List(vec![])),
            b'}' => self.push(Node::Dict(vec![])),
            b'a' => {
                let items = vec![self.pop()?];
                self.extend(items)?;
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.extend(vec![key, value])?;
            }
            b'e' | b'u' => {
                let items = self.pop_to_mark()?;
                self.extend(items)?;
            }
            b'Q' => {
                let id = self.pop()?;
                self.push(Node::Persistent(id));
            }
            b'R' | 0x81 => self.call()?,
            b'b' => drop(self.pop()?), // BUILD: the attributes of an object, which are not needed
            b'q' => {
                let i = self.take(1)?[0];
                self.put(i.into())?;
            }
            b'r' => {
                let i = u32::from_le_bytes(self.array()?);
                self.put(i)?;
            }
            0x94 => self.put(self.memo.len() as u32)?,
            b'h' => {
                let i = self.take(1)?[0];
                self.get(i.into())?;
            }
            b'j' => {
                let i = u32::from_le_bytes(self.array()?);
                self.get(i)?;
            }
            code => return Err(format!("opcode {code:#x} is not supported")),
        }
        Ok(None)
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let taken = self.bytes[self.at..].get(..n).ok_or("unexpected end of the data")?;
        self.at += n;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    /// Pushes an unsigned integer of `n` bytes.
    fn int(&mut self, n: usize) -> Result<()> {
        let value = self.take(n)?.iter().rev().fold(0, |value, &byte| value << 8 | i64::from(byte));
        self.stack.push(Value::Int(value));
        Ok(())
    }

    /// Pushes a signed integer of up to 255 bytes; [`Value::Other`] if it has more than 8.
    fn long1(&mut self) -> Result<()> {
        let n = self.take(1)?[0].into();
        let bytes = self.take(n)?;
        let fill = if bytes.last().is_some_and(|byte| byte & 0x80 != 0) { 0xff } else { 0 };
        let mut value = [fill; 8];
        if n > 8 {
            self.stack.push(Value::Other);
            return Ok(());
        }
        value[..n].copy_from_slice(bytes);
        self.stack.push(Value::Int(i64::from_le_bytes(value)));
        Ok(())
    }

    fn push_text(&mut self, len: usize) -> Result<()> {
        let text = std::str::from_utf8(self.take(len)?).map_err(|error| error.to_string())?;
        self.push(Node::Text(text));
        Ok(())
    }

    fn line(&mut self) -> Result<&'a str> {
        let rest = &self.bytes[self.at..];
        let end =
            rest.iter().position(|&byte| byte == b'\n').ok_or("unexpected end of the data")?;
        self.at += end + 1;
        std::str::from_utf8(&rest[..end]).map_err(|error| error.to_string())
    }

    fn push(&mut self, node: Node<'a>) {
        self.nodes.push(node);
        self.stack.push(Value::Node(self.nodes.len() - 1));
    }

    fn pop(&mut self) -> Result<Value> {
        match self.stack.pop() {
            None | Some(Value::Mark) => Err("stack underflow".to_string()),
            Some(value) => Ok(value),
        }
    }

    fn pop_to_mark(&mut self) -> Result<Vec<Value>> {
        let mark = self.stack.iter().rposition(|value| matches!(value, Value::Mark));
        let items = self.stack.split_off(mark.ok_or("there is no mark on the stack")? + 1);
        self.stack.pop();
        Ok(items)
    }

    fn tuple(&mut self, n: usize) -> Result<()> {
        let start = self.stack.len().checked_sub(n).ok_or("stack underflow")?;
        let items = self.stack.split_off(start);
        if items.iter().any(|item| matches!(item, Value::Mark)) {
            return Err("stack underflow".to_string());
        }
        self.push(Node::Tuple(items));
        Ok(())
    }

    /// Adds items to the list or dictionary on top of the stack.
    fn extend(&mut self, more: Vec<Value>) -> Result<()> {
        match self.stack.last() {
            Some(&Value::Node(node)) => match &mut self.nodes[node] {
                Node::List(items) => items.extend(more),
                Node::Dict(items) if more.len().is_multiple_of(2) => items.extend(more),
                _ => return Err("expected a list or a dictionary on the stack".to_string()),
            },
            _ => return Err("expected a list or a dictionary on the stack".to_string()),
        }
        Ok(())
    }

    fn call(&mut self) -> Result<()> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let dict = matches!(self.node(function), Some(Node::Global("collections", "OrderedDict")));
        let pairs = match dict.then(|| self.list(arguments)).transpose()? {
            None => {
                self.push(Node::Call(function, arguments));
                return Ok(());
            }
            Some([]) => vec![],
            // Python 2 passes the items as an argument.
            Some(&[pairs]) => {
                let pairs = self.list(pairs)?;
                let left = self.pairs_left.checked_sub(pairs.len());
                let left = left.ok_or("the dictionaries have too many items in total")?;
                let pairs = pairs.iter().map(|&pair| match *self.list(pair)? {
                    [key, value] => Ok([key, value]),
                    _ => Err("expected pairs of a key and a value".to_string()),
                });
                let pairs = pairs.collect::<Result<Vec<_>>>()?.concat();
                self.pairs_left = left;
                pairs
            }
            Some(_) => return Err("expected pairs of a key and a value".to_string()),
        };
        self.push(Node::Dict(pairs));
        Ok(())
    }

    fn put(&mut self, i: u32) -> Result<()> {
        let top = *self.stack.last().ok_or("stack underflow")?;
        self.memo.insert(i, top);
        Ok(())
    }

    fn get(&mut self, i: u32) -> Result<()> {
        let &value = self.memo.get(&i).ok_or_else(|| format!("the memo has no entry {i}"))?;
        self.stack.push(value);
        Ok(())
    }

    fn node(&self, value: Value) -> Option<&Node<'a>> {
        match value {
            Value::Node(node) => Some(&self.nodes[node]),
            _ => None,
        }
    }

    fn is_text(&self, value: Value, texts: &[&str]) -> bool {
        matches!(self.node(value), Some(Node::Text(text)) if texts.contains(text))
    }

    // Errors do not contain a whole string or list, which may be as long as the file.

    fn text(&self, value: Value) -> Result<&'a str> {
        match self.node(value) {
            Some(Node::Text(text)) => Ok(text),
            _ => Err("expected a string".to_string()),
        }
    }

    fn list(&self, value: Value) -> Result<&[Value]> {
        match self.node(value) {
            Some(Node::List(items) | Node::Tuple(items)) => Ok(items),
            _ => Err("expected a list".to_string()),
        }
    }

    fn sizes(&self, value: Value) -> Result<Vec<u64>> {
        let sizes = self.list(value)?;
        if sizes.len() > MAX_RANK {
            return Err(format!("expected at most {MAX_RANK} sizes, got {}", sizes.len()));
        }
        let sizes = sizes.iter().map(|size| match size {
            &Value::Int(size) => u64::try_from(size).map_err(|error| error.to_string()),
            _ => Err("expected a size".to_string()),
        });
        sizes.collect()
    }

    /// The tensors of a dictionary, or of the state dictionary in it.
    fn tensors(&self, root: Value) -> Result<PickledTensors<'a>> {
        let Some(Node::Dict(items)) = self.node(root) else {
            return Err("expected a dictionary of tensors".to_string());
        };
        let states = ["state_dict", "model_state_dict"];
        let state = items.chunks_exact(2).find_map(|item| match self.node(item[1]) {
            Some(Node::Dict(state)) if self.is_text(item[0], &states) => Some(state),
            _ => None,
        });
        let mut found = PickledTensors::default();
        for item in state.unwrap_or(items).chunks_exact(2) {
            let name = self.text(item[0])?;
            let view = self.view(item[1], &mut found.storages);
            let view = view.map_err(|e| {
                format!("entry {:?} is not a supported tensor: {e}", beginning(name))
            })?;
            if found.tensors.insert(name, view).is_some() {
                return Err(format!("tensor {:?} occurs twice", beginning(name)));
            }
        }
        Ok(found)
    }

    fn view(&self, value: Value, storages: &mut Storages<'a>) -> Result<View<'a>> {
        let Some(&Node::Call(function, arguments)) = self.node(value) else {
            return Err("expected a tensor or a parameter, as torch.save writes it".to_string());
        };
        let Some(&Node::Global(module, function)) = self.node(function) else {
            return Err("expected a tensor or a parameter, as torch.save writes it".to_string());
        };
        let arguments = self.list(arguments)?;
        match (module, function, arguments) {
            ("torch._utils", "_rebuild_tensor_v2", &[storage, offset, shape, strides, ..]) => {
                let Value::Int(offset) = offset else {
                    return Err("expected an offset".to_string());
                };
                let view = View {
                    storage: self.storage(storage, storages)?,
                    offset: u64::try_from(offset).map_err(|error| error.to_string())?,
                    shape: self.sizes(shape)?,
                    strides: self.sizes(strides)?,
                };
                if view.shape.len() == view.strides.len() {
                    Ok(view)
                } else {
                    Err("its numbers of sizes and strides differ".to_string())
                }
            }
            // A parameter wraps a tensor. Nested parameters are rejected, which bounds the
            // recursion.
            ("torch._utils", "_rebuild_parameter", &[tensor, ..]) if !self.is_parameter(tensor) => {
                self.view(tensor, storages)
            }
            _ => Err(format!("it is constructed by {}.{}", beginning(module), beginning(function))),
        }
    }

    fn is_parameter(&self, value: Value) -> bool {
        let Some(&Node::Call(function, _)) = self.node(value) else { return false };
        matches!(self.node(function), Some(Node::Global(_, "_rebuild_parameter")))
    }

    /// Records the dtype and length of a tensor's storage, and returns its key.
    fn storage(&self, value: Value, storages: &mut Storages<'a>) -> Result<&'a str> {
        let Some(&Node::Persistent(id)) = self.node(value) else {
            return Err("it has no storage".to_string());
        };
        let (key, description) = self.described_storage(id)?;
        match storages.insert(key, description) {
            Some(other) if other != description => {
                Err(format!("storage {:?} has two dtypes or lengths", beginning(key)))
            }
            _ => Ok(key),
        }
    }

    /// Dtype and length of the storages of all tensors, except those of unsupported dtypes.
    fn storages(&self) -> Storages<'a> {
        let ids = self.nodes.iter().filter_map(|node| match node {
            Node::Persistent(id) => self.described_storage(*id).ok(),
            _ => None,
        });
        ids.collect()
    }

    /// The key, the dtype and the length of a storage, from its persistent id
    /// `("storage", class, key, device, values)`.
    fn described_storage(&self, id: Value) -> Result<(&'a str, (Dtype, u64))> {
        let (class, key, values) = match *self.list(id)? {
            [_, class, key, _, values] => (class, key, values),
            [_, class, key, _, values, Value::Other] => (class, key, values), // None: not a view
            _ => return Err("its storage is a view of another storage".to_string()),
        };
        let Some(&Node::Global("torch", class)) = self.node(class) else {
            return Err("its storage has no dtype".to_string());
        };
        let dtype = match class {
            "FloatStorage" => Dtype::F32,
            "DoubleStorage" => Dtype::F64,
            "HalfStorage" => Dtype::F16,
            "BFloat16Storage" => Dtype::BF16,
            "LongStorage" => Dtype::I64,
            "IntStorage" => Dtype::I32,
            "ShortStorage" => Dtype::I16,
            "CharStorage" => Dtype::I8,
            "ByteStorage" => Dtype::U8,
            "BoolStorage" => Dtype::BOOL,
            other => {
                return Err(format!("its storage type {} is not supported", beginning(other)));
            }
        };
        let Value::Int(values) = values else { return Err("its storage has no size".to_string()) };
        let values = u64::try_from(values).map_err(|error| error.to_string())?;
        Ok((self.text(key)?, (dtype, values)))
    }
}
