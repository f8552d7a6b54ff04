"""The node check's tests of a device: a sound one passes, one changed bit is found."""

import torch

from unicron_lib.training.device_tests import Harm, devices, memory_fault, product_fault

CPU = torch.device("cpu")


def test_a_sound_device_passes_and_its_products_are_timed():
    assert memory_fault(CPU, Harm()) == ("", 0.0)
    text, took_s = product_fault(CPU, Harm())
    assert text == ""
    assert took_s > 0


def test_one_bit_of_memory_that_changed_is_found():
    text, _ = memory_fault(CPU, Harm(memory=lambda chunk: chunk[1000].bitwise_xor_(1 << 40)))
    assert text == "1 of 8388608 words read back otherwise than written"


def test_one_element_of_a_product_that_is_off_by_one_is_found():
    text, _ = product_fault(CPU, Harm(product=lambda product: product[17, 3].add_(1.0)))
    assert text == "1 of 512 rows of a matrix product are wrong"


def test_there_is_always_a_device():
    assert devices()
