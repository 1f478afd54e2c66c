//! The form of the table of metrics.
//!
//! ```text
//! /// The meaning.
//! field: Type[BUCKETS]("name"; "label", "label" in VALUES; if case);
//! ```
//!
//! `VALUES` are the values of the label that are known at the start, and `case` says which of their
//! combinations exist; both are in `values`.

macro_rules! metrics {
    ($($(#[doc = $help:literal])+ $field:ident: $kind:ident $([$buckets:ident])?
       ($name:literal; $($label:literal $(in $values:ident)?),* $(; if $case:ident)?);)+) => {
        /// Every metric of a router.
        #[allow(missing_docs)]
        pub struct Metrics {
            registry: prometheus::Registry,
            exemplars: crate::exemplars::ExemplarStore,
            $($(#[doc = $help])+ pub $field: $kind,)+
        }

        impl Metrics {
            /// Registers all metrics, and creates the series that do not depend on the configuration.
            ///
            /// # Errors
            /// If two metrics have the same name, which a test excludes.
            pub fn new() -> Result<Self, prometheus::Error> {
                let registry = prometheus::Registry::new_custom(Some("splitrail".into()), None)?;
                $(let $field = metrics!(@make $kind $([$buckets])? $name, concat!($($help),+).trim(), &[$($label),*])?;
                registry.register(Box::new($field.clone()))?;)+
                let exemplars = crate::exemplars::ExemplarStore::default();
                let all = Self { registry, exemplars, $($field),+ };
                all.declare(&Scope::Router);
                all.declare(&Scope::Model("none"));
                Ok(all)
            }

            /// The table of metrics.
            pub const fn definitions() -> &'static [Definition] {
                const TABLE: &[Definition] = &[$(Definition {
                    name: $name,
                    kind: metrics!(@kind $kind),
                    labels: &[$(LabelDefinition { name: $label, values: metrics!(@values $($values)?) }),*],
                    help: concat!($($help),+).trim_ascii(),
                    case: metrics!(@case $($case)?),
                }),+];
                TABLE
            }

            /// Calls a function with each metric and its line in the table.
            fn each(&self, act: &mut dyn FnMut(&'static Definition, &dyn declare::Family)) {
                let families: [&dyn declare::Family; Self::definitions().len()] = [$(&self.$field),+];
                Self::definitions().iter().zip(families).for_each(|(one, family)| act(one, family));
            }
        }
    };
    (@make HistogramVec [$buckets:ident] $name:expr, $help:expr, $labels:expr) => {
        HistogramVec::new(
            prometheus::HistogramOpts::new($name, $help).buckets(buckets::$buckets.to_vec()),
            $labels,
        )
    };
    (@make $kind:ident $name:expr, $help:expr, $labels:expr) => {
        $kind::new(prometheus::Opts::new($name, $help), $labels)
    };
    (@kind IntCounterVec) => { MetricKind::Counter };
    (@kind CounterVec) => { MetricKind::Counter };
    (@kind HistogramVec) => { MetricKind::Histogram };
    (@kind $other:ident) => { MetricKind::Gauge };
    (@values) => { None };
    (@values $values:ident) => { Some(values::$values) };
    (@case) => { None };
    (@case $case:ident) => { Some(values::$case) };
}
