//! Checks of argument shapes, with errors that name the argument.

use candle_core::{DType, Tensor};

use crate::{Error, Result};

/// The [`Error::Shape`] for an argument `x` that should have the shape `expected`.
pub(crate) fn shape_error(argument: &'static str, x: &Tensor, expected: String) -> Error {
    Error::Shape { argument, expected, got: x.dims().to_vec() }
}

/// Checks that `heads` is `(B, H + G, T, D)` with at least `h` heads.
pub(crate) fn check_heads(heads: &Tensor, h: usize) -> Result<()> {
    match heads.dims() {
        [_, all, _, _] if *all >= h => Ok(()),
        _ => Err(shape_error("heads", heads, format!("(B, H + G, T, D) with H = {h}"))),
    }
}

/// Checks the rank of `x`; `shape` is the expected shape in the letters of the table in the crate's
/// documentation.
pub(crate) fn expect_rank(
    argument: &'static str,
    x: &Tensor,
    rank: usize,
    shape: &str,
) -> Result<()> {
    if x.rank() == rank { Ok(()) } else { Err(shape_error(argument, x, shape.to_string())) }
}

/// Checks the dimensions of `x`; `shape` is the expected shape in the letters of the table in
/// the crate's documentation.
pub(crate) fn expect_dims(
    argument: &'static str,
    x: &Tensor,
    dims: &[usize],
    shape: &'static str,
) -> Result<()> {
    if x.dims() == dims {
        Ok(())
    } else {
        Err(shape_error(argument, x, format!("{shape} = {dims:?}")))
    }
}

/// Checks that the shapes of queries, keys and values match, and returns `[B, H, T, S]`.
///
/// # Shapes
/// `q`: `(B, H, T, D)`; `k`: `(B, G, S, D)`; `v`: `(B, G, S, V)`, where G divides H and D is not 0
/// # Errors
/// [`Error::Shape`] for other shapes; [`Error::Zero`] for D = 0; [`Error::DType`] for integers, and
/// if some tensors are in f64 and others are not.
pub(crate) fn check_qkv(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<[usize; 4]> {
    let &[b, h, t, d] = q.dims() else {
        return Err(shape_error("q", q, "(B, H, T, D)".to_string()));
    };
    let &[_, groups, s, _] = k.dims() else {
        return Err(shape_error("k", k, "(B, G, S, D)".to_string()));
    };
    if groups == 0 || !h.is_multiple_of(groups) {
        return Err(shape_error("k", k, format!("a number of heads that divides H = {h}")));
    }
    let &[_, _, _, value_d] = v.dims() else {
        return Err(shape_error("v", v, "(B, G, S, V)".to_string()));
    };
    if d == 0 {
        return Err(Error::Zero { field: "D, the width of a head" });
    }
    if !q.dtype().is_float() {
        return Err(Error::DType { argument: "q", expected: "floats", got: q.dtype() });
    }
    for (argument, x) in [("k", k), ("v", v)] {
        if !x.dtype().is_float() {
            return Err(Error::DType { argument, expected: "floats", got: x.dtype() });
        }
        if (x.dtype() == DType::F64) != (q.dtype() == DType::F64) {
            let expected = "f64 if and only if q is f64";
            return Err(Error::DType { argument, expected, got: x.dtype() });
        }
    }
    expect_dims("k", k, &[b, groups, s, d], "(B, G, S, D)")?;
    expect_dims("v", v, &[b, groups, s, value_d], "(B, G, S, V)")?;
    Ok([b, h, t, s])
}

/// The dtype of the scores of queries with this dtype.
pub(crate) fn score_dtype(queries: DType) -> DType {
    if queries == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Checks the offsets of ragged sequences.
///
/// # Shapes
/// `offsets`: `(B + 1,)`, the index of each sequence's first token, then `tokens`
/// # Errors
/// [`Error::Shape`] if there is no offset; [`Error::Offset`] if the first offset is not 0, if a
/// sequence has fewer than `min_length` tokens, or if the last offset is not `tokens`.
///
/// # Examples
/// ```
/// mha::check_offsets(&[0, 3, 5], 1, 5)?;
/// let error = mha::check_offsets(&[0, 3, 3], 1, 3).unwrap_err();
/// assert_eq!(error.to_string(), "offsets[2] is 3: expected at least 4, because offsets[1] is 3");
/// # Ok::<(), mha::Error>(())
/// ```
pub fn check_offsets(offsets: &[usize], min_length: usize, tokens: usize) -> Result<()> {
    let wrong = |index, got, expected| Err(Error::Offset { index, got, expected });
    let (Some(&first), Some(&last)) = (offsets.first(), offsets.last()) else {
        let (argument, expected) = ("offsets", "(B + 1,), at least one offset".to_string());
        return Err(Error::Shape { argument, expected, got: vec![0] });
    };
    if first != 0 {
        return wrong(0, first, "0".to_string());
    }
    for (i, pair) in offsets.windows(2).enumerate() {
        let min = pair[0].saturating_add(min_length);
        if pair[1] < min {
            let expected = format!("at least {min}, because offsets[{i}] is {}", pair[0]);
            return wrong(i + 1, pair[1], expected);
        }
    }
    if last == tokens {
        Ok(())
    } else {
        wrong(offsets.len() - 1, last, format!("{tokens}, the number of tokens"))
    }
}
