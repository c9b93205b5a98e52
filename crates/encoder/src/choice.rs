//! Settings with a fixed set of named values.

use crate::{Error, InputError, Result};

/// A setting with a fixed set of named values, such as [`Precision`](crate::Precision). Commands,
/// HTTP routes and the Python package take the names and the help texts from here. [`choices!`]
/// declares the type.
///
/// [`choices!`]: crate::choices
pub trait Choice: Copy + PartialEq + 'static {
    /// The field's term for the setting, for errors.
    const TERM: &'static str;
    /// All values, in the order of help texts and errors.
    const ALL: &'static [Self];

    /// The name of a value, which [`str::parse`] accepts.
    fn name(self) -> &'static str;

    /// The meaning of a value, a phrase without a full stop.
    fn help(self) -> &'static str;

    /// The value of this name.
    ///
    /// # Errors
    /// [`InputError::UnknownChoice`] if no value has the name.
    fn from_name(name: &str) -> Result<Self> {
        let found = Self::ALL.iter().copied().find(|value| value.name() == name);
        found.ok_or_else(|| {
            Error::Input(InputError::UnknownChoice {
                setting: Self::TERM,
                got: name.to_string(),
                expected: Self::ALL.iter().map(|value| value.name()).collect(),
            })
        })
    }
}

/// The text of a documentation comment without its full stop.
#[doc(hidden)]
pub fn phrase(documentation: &'static str) -> &'static str {
    documentation.trim().trim_end_matches('.')
}

/// Declares an enum that is a [`Choice`]: each variant has a help text (its documentation) and a
/// name. The names are also those of `Display`, `FromStr` and serde. `default` is optional.
///
/// # Examples
/// ```
/// use encoder::Choice;
///
/// encoder::choices! {
///     /// The order of the hits.
///     pub enum Order: "order", default Descending {
///         /// The best hit last.
///         Ascending = "asc",
///         /// The best hit first.
///         Descending = "desc",
///     }
/// }
/// assert_eq!(Order::default().to_string(), "desc");
/// assert_eq!("asc".parse::<Order>()?, Order::Ascending);
/// assert_eq!(Order::Ascending.help(), "The best hit last");
/// assert_eq!(
///     "up".parse::<Order>().unwrap_err().to_string(),
///     "order \"up\" is unknown: expected one of asc, desc"
/// );
/// # Ok::<(), encoder::Error>(())
/// ```
#[macro_export]
macro_rules! choices {
    (
        $(#[$meta:meta])*
        pub enum $type:ident: $term:literal $(, default $default:ident)? {
            $($(#[doc = $doc:literal])+ $variant:ident = $name:literal,)+
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        #[non_exhaustive]
        pub enum $type {
            $($(#[doc = $doc])+ #[serde(rename = $name)] $variant,)+
        }

        impl $crate::Choice for $type {
            const TERM: &'static str = $term;
            const ALL: &'static [Self] = &[$(Self::$variant),+];

            fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            fn help(self) -> &'static str {
                $crate::phrase(match self {
                    $(Self::$variant => concat!($($doc),+),)+
                })
            }
        }

        $(
            impl Default for $type {
                fn default() -> Self {
                    Self::$default
                }
            }
        )?

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str($crate::Choice::name(*self))
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::Error;

            fn from_str(name: &str) -> $crate::Result<Self> {
                $crate::Choice::from_name(name)
            }
        }
    };
}
