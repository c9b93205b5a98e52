//! The models of a server, as a program that starts the server gives and replaces them.

use std::{collections::HashMap, fmt, sync::Arc};

use crate::{
    Error, Limits, Model,
    app::App,
    registry::{NamedModels, find_named},
};

/// The models of a server, with the thread that computes their requests.
///
/// Clones share the models. While there are no models, `/health` and requests that need a model
/// fail with status 503.
#[derive(Clone)]
pub struct Models(pub(crate) Arc<App>);

/// Prints the limits.
impl fmt::Debug for Models {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Models").field("limits", &self.0.limits).finish_non_exhaustive()
    }
}

impl Models {
    /// Starts an engine without models. [`Self::replace`] adds them.
    ///
    /// # Errors
    /// [`Error::Thread`] if the thread cannot be started.
    pub fn new(limits: Limits) -> Result<Self, Error> {
        Ok(Self(Arc::new(App::start(limits)?)))
    }

    /// Warms up each model, and then replaces all models by these. The first is the default.
    /// Requests in progress keep the models that they began with.
    ///
    /// # Errors
    /// [`Error::SameName`] for two models of the same name; [`Error::Model`] if a model cannot
    /// compute.
    pub fn replace(&self, models: Vec<(String, Model)>) -> Result<(), Error> {
        for (i, (name, model)) in models.iter().enumerate() {
            if models[..i].iter().any(|(other, _)| other == name) {
                return Err(Error::SameName { name: name.clone() });
            }
            model.warm_up()?;
        }
        let new: NamedModels =
            models.into_iter().map(|(name, model)| (name, Arc::new(model))).collect();
        let App { registry, engine, metrics, .. } = &*self.0;
        let replaced = registry.all().unwrap_or_default();
        // A model has the measured speed of the model that it replaces, so that `Limits::max_wait`
        // holds from the first request on.
        let numbers_of_same_name = |(name, model): &(String, Arc<Model>)| {
            let (_, old) = find_named(&replaced, name)?;
            Some((old.number(), model.number()))
        };
        let pairs: Vec<(u64, u64)> = new.iter().filter_map(numbers_of_same_name).collect();
        engine.inherit_speeds(&pairs);
        let names: HashMap<u64, String> =
            new.iter().map(|(name, model)| (model.number(), name.clone())).collect();
        let replaced_numbers: Vec<u64> = replaced.iter().map(|(_, model)| model.number()).collect();
        metrics.set_names(names, &replaced_numbers);
        let loaded = new.iter().map(|(_, model)| model.created()).max().unwrap_or_default();
        metrics.loaded.set(loaded as i64);
        registry.replace(new);
        Ok(())
    }

    /// Makes `/health` fail, so that load balancers send no more requests. Other routes still
    /// work, and their responses close the connection.
    pub fn stop(&self) {
        self.0.stop();
    }
}
