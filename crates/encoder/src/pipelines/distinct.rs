//! Equal items are computed once: a result depends on its item alone, not on the other items of a
//! batch.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::Hash,
};

use crate::Tokens;

/// The distinct items of a list, so that equal ones are computed once.
///
/// # Examples
/// ```
/// use encoder::Distinct;
///
/// let distinct = Distinct::by_key(["It snows.", "I love AI", "It snows."], |text| *text);
/// assert_eq!(distinct.items, ["It snows.", "I love AI"]);
/// let lengths = distinct.items.iter().map(|text| text.len()).collect();
/// assert_eq!(distinct.expand(lengths), [9, 9, 9]);
/// ```
#[derive(Clone, Debug)]
pub struct Distinct<T> {
    /// The distinct items, in the order of their first occurrence.
    pub items: Vec<T>,
    /// For each item of the list, the index of the equal one in `items`.
    pub(crate) indices: Vec<usize>,
}

impl<T> Distinct<T> {
    /// Items are equal if `key` is.
    pub fn by_key<K: Eq + Hash>(all: impl IntoIterator<Item = T>, key: impl Fn(&T) -> K) -> Self {
        let (mut items, mut known) = (vec![], HashMap::new());
        let index = |item: T| match known.entry(key(&item)) {
            Entry::Occupied(index) => *index.get(),
            Entry::Vacant(entry) => {
                items.push(item);
                *entry.insert(items.len() - 1)
            }
        };
        let indices = all.into_iter().map(index).collect();
        Self { items, indices }
    }

    /// The value of each item of the list, from those of the distinct items.
    pub fn expand<V: Clone>(&self, values: Vec<V>) -> Vec<V> {
        if values.len() == self.indices.len() {
            return values;
        }
        self.indices.iter().map(|&i| values[i].clone()).collect()
    }
}

impl<'a> Distinct<&'a Tokens> {
    /// The distinct sequences of tokens.
    pub(crate) fn sequences(all: &[&'a Tokens]) -> Self {
        Self::by_key(all.iter().copied(), |tokens| (&tokens.input_ids[..], &tokens.token_type_ids))
    }
}

impl<'a> Distinct<(&'a Tokens, usize)> {
    /// The distinct sequences of tokens with the number of those of the prompt.
    pub(crate) fn prompted(all: &[(&'a Tokens, usize)]) -> Self {
        let key = |&(tokens, prompt): &(&'a Tokens, usize)| {
            (&tokens.input_ids[..], &tokens.token_type_ids[..], prompt)
        };
        Self::by_key(all.iter().copied(), key)
    }
}
