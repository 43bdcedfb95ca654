//! Kernel arguments, declared once for both sides.
//!
//! A kernel takes one struct by value. [`kernel_args!`] declares such structs: from one list of fields it makes the
//! `#[repr(C)]` type that the host fills in and a [`Layout`], from which [`ArgsHeader::text`] writes the CUDA C++
//! definition. NVRTC gets that text as an in-memory header, and device code says `#include "args/<module>.cuh"`.
//!
//! Layouts cannot differ: the order and types of the fields come from the same list; the macro refuses a struct with
//! implicit padding, so that every offset is the sum of the sizes before it; and the header asserts size and alignment
//! when it is compiled.

/// A type whose values may be kernel arguments, or fields of them.
///
/// # Safety
/// Its CUDA counterpart has the same size, alignment and meaning, and it has no padding.
pub(super) unsafe trait DeviceType: Copy + 'static {
    /// Name in CUDA C++, of an element where it is an array.
    const CUDA_NAME: &'static str;
    /// Length, where it is an array.
    const LENGTH: Option<usize> = None;
}

macro_rules! scalars {
    ($($rust:ty => $cuda:literal),*) => {
        $(
            // SAFETY: the typedefs of prelude.cuh, whose sizes it asserts.
            unsafe impl DeviceType for $rust {
                const CUDA_NAME: &'static str = $cuda;
            }
        )*
    };
}
scalars!(u32 => "u32", i32 => "i32", u64 => "u64", i64 => "i64", f32 => "float", f64 => "double");

// SAFETY: arrays of both languages are their elements, one after another.
unsafe impl<T: DeviceType, const N: usize> DeviceType for [T; N] {
    const CUDA_NAME: &'static str = T::CUDA_NAME;
    const LENGTH: Option<usize> = Some(N);
}

/// A field of a struct of arguments.
pub(super) struct Field {
    pub(super) doc: &'static [&'static str],
    pub(super) name: &'static str,
    pub(super) cuda_type: &'static str,
    pub(super) length: Option<usize>,
}

/// A struct of arguments: what its CUDA definition is written from.
pub(super) struct Layout {
    pub(super) doc: &'static [&'static str],
    pub(super) name: &'static str,
    pub(super) size: usize,
    pub(super) align: usize,
    pub(super) fields: &'static [Field],
}

/// The argument structs of a module, as a header for device code.
pub(super) struct ArgsHeader {
    /// As device code includes it, `args/<module>.cuh`.
    pub(super) name: &'static str,
    /// Headers with the types of fields.
    pub(super) includes: &'static [&'static str],
    pub(super) layouts: &'static [&'static Layout],
}

impl ArgsHeader {
    /// The header: definitions of the structs, and assertions of their layout.
    pub(super) fn text(&self) -> String {
        let mut out = String::from("#pragma once\n#include \"prelude.cuh\"\n");
        for include in self.includes {
            out += &format!("#include \"{include}\"\n");
        }
        for layout in self.layouts {
            out += &layout.definition();
        }
        out
    }
}

impl Layout {
    /// The struct in CUDA C++, with the doc comments of its declaration.
    fn definition(&self) -> String {
        let Layout { doc, name, size, align, fields } = self;
        let comment = |indent: &str, doc: &[&str]| -> String {
            doc.iter().map(|line| format!("{indent}//{line}\n")).collect()
        };
        let field = |f: &Field| {
            let length = f.length.map(|n| format!("[{n}]")).unwrap_or_default();
            format!("{}    {} {}{length};\n", comment("    ", f.doc), f.cuda_type, f.name)
        };
        let fields: String = fields.iter().map(field).collect();
        format!(
            "{}struct alignas({align}) {name} {{\n{fields}}};\n\
             static_assert(sizeof({name}) == {size} && alignof({name}) == {align}, \"{name}\");\n",
            comment("", doc)
        )
    }
}

/// Declares the argument structs of a module, and `ARGS`, their header:
///
/// ```text
/// kernel_args! {
///     header "args/copy.cuh", includes [];
///     /// What it is for.
///     struct CopyArgs {
///         /// First byte to read.
///         from: u64,
///     }
/// }
/// ```
///
/// `#[derive(..)]` after the doc comment adds traits to `Clone` and `Copy`; `align(64)` after the name sets an alignment.
macro_rules! kernel_args {
    (
        header $header:literal, includes [$($include:literal),*];
        $(
            $(#[doc = $doc:expr])*
            $(#[derive($($derive:ident),*)])?
            $vis:vis struct $name:ident $(align($align:literal))? {
                $($(#[doc = $field_doc:expr])* $field_vis:vis $field:ident: $ty:ty,)*
            }
        )*
    ) => {
        $(
            $(#[doc = $doc])*
            #[repr(C $(, align($align))?)]
            #[derive(Clone, Copy $($(, $derive)*)?)]
            $vis struct $name {
                $($(#[doc = $field_doc])* $field_vis $field: $ty,)*
            }

            // Fields that fill the struct leave no padding, neither here nor in CUDA C++, where they have the same sizes.
            const _: () = assert!(
                size_of::<$name>() == 0 $(+ size_of::<$ty>())*,
                concat!(stringify!($name), " has implicit padding: add fields that fill it"),
            );

            // SAFETY: the CUDA definition is written from `LAYOUT`, and has no padding either.
            unsafe impl $crate::cuda::args::DeviceType for $name {
                const CUDA_NAME: &'static str = stringify!($name);
            }

            impl $name {
                const LAYOUT: $crate::cuda::args::Layout = $crate::cuda::args::Layout {
                    doc: &[$($doc),*],
                    name: stringify!($name),
                    size: size_of::<$name>(),
                    align: align_of::<$name>(),
                    fields: &[$($crate::cuda::args::Field {
                        doc: &[$($field_doc),*],
                        name: stringify!($field),
                        cuda_type: <$ty as $crate::cuda::args::DeviceType>::CUDA_NAME,
                        length: <$ty as $crate::cuda::args::DeviceType>::LENGTH,
                    }),*],
                };
            }
        )*

        /// The header with these structs, for device code.
        pub(in crate::cuda) const ARGS: $crate::cuda::args::ArgsHeader = $crate::cuda::args::ArgsHeader {
            name: $header,
            includes: &[$($include),*],
            layouts: &[$(&$name::LAYOUT),*],
        };
    };
}
pub(super) use kernel_args;

#[cfg(test)]
mod tests {
    use crate::cuda::sources::ARGS_HEADERS;
    use std::collections::HashSet;

    kernel_args! {
        header "args/example.cuh", includes ["args/philox.cuh"];
        /// Two numbers.
        #[derive(Default)]
        struct Pair {
            /// The first.
            x: u64,
            y: [f32; 2],
        }
    }

    #[test]
    fn the_header_defines_the_struct_field_by_field() {
        assert_eq!(
            ARGS.text(),
            "#pragma once\n#include \"prelude.cuh\"\n#include \"args/philox.cuh\"\n// Two numbers.\n\
             struct alignas(8) Pair {\n    // The first.\n    u64 x;\n    float y[2];\n};\n\
             static_assert(sizeof(Pair) == 16 && alignof(Pair) == 8, \"Pair\");\n"
        );
    }

    #[test]
    fn names_of_headers_and_structs_are_unique() {
        let (mut headers, mut structs) = (HashSet::new(), HashSet::new());
        for header in ARGS_HEADERS {
            assert!(headers.insert(header.name), "{}", header.name);
            assert!(header.layouts.iter().all(|l| structs.insert(l.name)), "{}", header.name);
        }
    }
}
