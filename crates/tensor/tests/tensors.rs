//! Views, memory and transfers.
#![allow(clippy::unwrap_used)]

use ferrotron_tensor::*;

fn stream() -> Stream {
    Device::cpu(Threads::new(1).unwrap()).stream("compute").unwrap()
}

fn counting(s: &Stream, shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    s.upload(&(0..n as i32).collect::<Vec<_>>(), shape, Category::Activations).unwrap()
}

#[test]
fn views_see_the_right_elements() {
    let s = stream();
    let t = counting(&s, &[2, 3, 4]);
    assert_eq!(
        s.download::<i32>(&t.narrow(2, 1, 2).unwrap()).unwrap(),
        [1, 2, 5, 6, 9, 10, 13, 14, 17, 18, 21, 22]
    );
    assert_eq!(s.download::<i32>(&t.select(1, 2).unwrap()).unwrap(), [8, 9, 10, 11, 20, 21, 22, 23]);
    let swapped = t.transpose(0, 2).unwrap();
    assert_eq!(s.download::<i32>(&swapped).unwrap()[..6], [0, 12, 4, 16, 8, 20]);
    assert!(t.narrow(1, 2, 2).is_err() && t.narrow(3, 0, 1).is_err() && t.select(0, 2).is_err());
    assert!(t.narrow(1, usize::MAX, 2).is_err());
}

/// Kernels take any part of a tensor without elements.
#[test]
fn parts_of_empty_tensors_have_a_place() {
    let s = stream();
    for (shape, axis) in [([0, 8], 1), ([8, 0], 0)] {
        let t = s.zeros(&shape, DType::F32, Category::Activations).unwrap();
        let part = t.narrow(axis, 4, 4).unwrap();
        s.copy(&part, &s.zeros(part.shape(), DType::F32, Category::Activations).unwrap()).unwrap();
    }
}

#[test]
fn view_splits_and_joins_axes_of_strided_tensors() {
    let s = stream();
    let t = counting(&s, &[4, 6]);
    let q = t.narrow(1, 2, 4).unwrap();
    let heads = q.view(&[4, 2, 2]).unwrap();
    assert_eq!(s.download::<i32>(&heads).unwrap(), s.download::<i32>(&q).unwrap());
    assert_eq!(heads.strides(), [6, 2, 1]);
    assert_eq!(heads.view(&[2, 2, 4]).unwrap().strides(), [12, 6, 1]);
    assert_eq!(heads.view(&[4, 4]).unwrap().strides(), [6, 1]);
    assert!(q.view(&[16]).is_err(), "axes with gaps cannot be merged");
    assert!(q.view(&[5, 3]).is_err());
    assert_eq!(t.view(&[24]).unwrap().shape(), [24]);
    assert_eq!(t.view(&[1, 4, 1, 6]).unwrap().numel(), 24);
}

#[test]
fn memory_is_accounted_by_category_and_released() {
    let s = stream();
    let before = s.device().memory();
    let a = s.zeros(&[256], DType::F32, Category::Gradients).unwrap();
    let b = a.narrow(0, 3, 5).unwrap();
    drop(a);
    assert_eq!(s.device().memory().now[Category::Gradients as usize], 1024, "a view keeps the buffer alive");
    drop(b);
    let after = s.device().memory();
    assert_eq!(after.now, before.now);
    assert_eq!(after.peak[Category::Gradients as usize], 1024);
    assert!(after.to_string().contains("gradients"));
}

#[test]
fn launches_refuse_overlap_wrong_types_and_undeclared_writes() {
    let s = stream();
    let t = counting(&s, &[4, 6]);
    let (left, right) = (t.narrow(1, 0, 3).unwrap(), t.narrow(1, 3, 3).unwrap());
    s.launch("columns", &[read(&left), write(&right)], |l| {
        assert!(l.slice_mut::<i32>(1).is_err(), "its gaps contain the other argument");
        assert!(l.pointer_mut::<i32>(1).is_ok() && l.pointer_mut::<i32>(0).is_err());
        assert!(
            matches!(l.slice::<i32>(0), Err(Error::Overlap { a: 0, b: 1, .. })),
            "the read argument has gaps too"
        );
        assert!(matches!(l.slice::<f32>(0), Err(Error::DType { .. })));
        Ok(())
    })
    .unwrap();
    let inside = right.narrow(0, 0, 1).unwrap();
    s.launch("a row", &[read(&left), write(&inside)], |l| {
        assert!(
            l.slice_mut::<i32>(1).is_ok() && l.slice::<i32>(0).is_err(),
            "the written argument lies in a gap"
        );
        Ok(())
    })
    .unwrap();
    // Either of them may be the written one.
    s.launch("a row", &[read(&inside), write(&left)], |_| Ok(())).unwrap();
    let rows = counting(&s, &[2, 3, 8]);
    let heads = |start, n| rows.narrow(2, start, 2 * n).unwrap().view(&[2, 3, n, 2]).unwrap();
    s.launch("heads", &[write(&heads(0, 2)), write(&heads(4, 1)), write(&heads(6, 1))], |_| Ok(())).unwrap();
    assert!(s.launch("heads", &[write(&heads(0, 2)), write(&heads(2, 1))], |_| Ok(())).is_err());
    let middle = t.narrow(1, 2, 2).unwrap();
    let clash = s.launch("clash", &[read(&left), write(&middle)], |_| Ok(()));
    assert!(matches!(clash, Err(Error::Overlap { a: 1, b: 0, .. })));
    let nested = s.launch("outer", &[write(&t)], |_| s.launch("inner", &[read(&t)], |_| Ok(())));
    assert!(matches!(nested, Err(Error::Race(_))));
}

#[test]
fn oversized_shapes_are_errors() {
    let s = stream();
    assert!(Tensor::empty(&s, &[usize::MAX, 2], DType::F32, Category::Workspace).is_err());
    assert!(Tensor::empty(&s, &[1 << 62], DType::U8, Category::Workspace).is_err());
    assert!(Tensor::empty(&s, &[1; 6], DType::U8, Category::Workspace).is_err());
    let none = s.zeros(&[0, 7], DType::F32, Category::Workspace).unwrap();
    assert!(s.download::<f32>(&none).unwrap().is_empty());
}
