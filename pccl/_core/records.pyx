# cython: language_level=3, auto_pickle=False, boundscheck=False, wraparound=False
"""Frozen records: the base of events, actions, messages and options.

A record is declared like a dataclass and behaves like a frozen dataclass with slots: it compares by type and value,
prints, hashes, pickles and matches by position. It exists because the peer actor must start in tens of milliseconds,
and importing `dataclasses` alone costs twenty.

A reduce passes through about sixty records in five processes, each of which wakes up with cold caches. A Python
constructor for every class took a third of the machines' time (measured with `perf`). So one C function constructs the
records of all classes: it allocates, and stores the arguments in the slots. Therefore a record class has no `__init__`
and cannot be derived from.

A leaf: it imports nothing of the project and nothing slow.
"""

from cpython.object cimport PyObject

cdef extern from "Python.h":
    ctypedef object (*vectorcallfunc)(object, PyObject *const *, size_t, PyObject *)
    ctypedef object (*newfunc)(object, object, PyObject *)
    ctypedef struct PyTypeObject:
        unsigned long tp_flags
        newfunc tp_new
        vectorcallfunc tp_vectorcall
    object PyType_GenericAlloc(PyTypeObject *, Py_ssize_t)
    Py_ssize_t PyVectorcall_NARGS(size_t)
    PyObject **PySequence_Fast_ITEMS(object)
    unsigned long Py_TPFLAGS_BASETYPE
    void Py_INCREF(PyObject *)

cdef extern from "structmember.h":
    ctypedef struct PyMemberDef:
        Py_ssize_t offset
    ctypedef struct PyMemberDescrObject:
        PyMemberDef *d_member


def record(cls):
    """Turn a class with annotated fields into a frozen, slotted value type."""
    names = tuple(cls.__dict__.get("__annotations__", ()))
    defaults = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
    body = {
        key: value
        for key, value in cls.__dict__.items()
        if key not in defaults and key not in ("__dict__", "__weakref__")
    }
    body.update(__slots__=names, __match_args__=names)
    for special, function in SPECIAL.items():
        body.setdefault(special, function)
    frozen = type(cls.__name__, cls.__bases__, body)
    all_fields[frozen] = Fields(frozen, names, defaults)
    (<PyTypeObject *> frozen).tp_vectorcall = make
    (<PyTypeObject *> frozen).tp_new = <newfunc> make_from
    (<PyTypeObject *> frozen).tp_flags &= ~Py_TPFLAGS_BASETYPE
    return frozen


def replace(value, **changes):
    """A copy of the record with some fields changed."""
    cdef Fields fields = fields_of(type(value))
    return type(value)(**{**dict(zip(fields.names, values(value, fields))), **changes})


# --- where the fields are -------------------------------------------------------------------------------------

cdef dict all_fields = {}  # record class -> its Fields


cdef class Fields:
    """The fields of one record class, in the order of their declaration, and where an instance holds them."""

    def __init__(self, cls, tuple names, dict defaults):
        if len(names) > FIELDS_MAX:
            raise ValueError(f"{cls.__name__} has {len(names)} fields, a record may have {FIELDS_MAX}")
        self.names = names
        self.defaults = defaults
        self.count = len(names)
        for i, name in enumerate(names):
            self.offsets[i] = offset_of(cls, name)


cdef Py_ssize_t offset_of(cls, str name) except -1:
    return (<PyMemberDescrObject *> <PyObject *> cls.__dict__[name]).d_member.offset


cdef Fields fields_of(cls):
    return <Fields> all_fields[cls]


cdef inline PyObject **slot(value, Py_ssize_t offset) noexcept:
    return <PyObject **> (<char *> <PyObject *> value + offset)


cdef object get(value, Py_ssize_t offset):
    return <object> slot(value, offset)[0]


cdef int put(value, Py_ssize_t offset, field) except -1:
    Py_INCREF(<PyObject *> field)
    slot(value, offset)[0] = <PyObject *> field
    return 0


cdef object blank(cls):
    return PyType_GenericAlloc(<PyTypeObject *> cls, 0)


cdef object make(object cls, PyObject *const *arguments, size_t flagged, PyObject *keywords):
    """The call of a record class: positional arguments in order, then those by name, then defaults."""
    cdef Fields fields = fields_of(cls)
    cdef Py_ssize_t i, given = PyVectorcall_NARGS(flagged)
    if given > fields.count:
        raise TypeError(f"{cls.__name__}() takes {fields.count} arguments, not {given}")
    value = blank(cls)
    for i in range(given):
        put(value, fields.offsets[i], <object> arguments[i])
    if keywords != NULL:
        put_keywords(value, fields, <tuple> keywords, arguments + given)
    if given < fields.count:
        put_defaults(value, fields, given)
    return value


cdef object make_from(object cls, object positional, PyObject *by_name):
    """The same, for arguments in a tuple and a dictionary."""
    cdef dict named = {} if by_name == NULL else <dict> by_name
    cdef tuple arguments = <tuple> positional + tuple(named.values())
    cdef tuple keywords = tuple(named)
    return make(cls, PySequence_Fast_ITEMS(arguments), len(<tuple> positional), <PyObject *> keywords)


cdef int put_keywords(value, Fields fields, tuple keywords, PyObject *const *arguments) except -1:
    cdef Py_ssize_t i, offset
    for i in range(len(keywords)):
        if keywords[i] not in fields.names:
            raise TypeError(f"{type(value).__name__}() has no argument {keywords[i]!r}")
        offset = fields.offsets[fields.names.index(keywords[i])]
        if slot(value, offset)[0] != NULL:
            raise TypeError(f"{type(value).__name__}() has two values for argument {keywords[i]!r}")
        put(value, offset, <object> arguments[i])
    return 0


cdef int put_defaults(value, Fields fields, Py_ssize_t first) except -1:
    cdef Py_ssize_t i
    for i in range(first, fields.count):
        if slot(value, fields.offsets[i])[0] == NULL:
            if fields.names[i] not in fields.defaults:
                raise TypeError(f"{type(value).__name__}() lacks its argument {fields.names[i]!r}")
            put(value, fields.offsets[i], fields.defaults[fields.names[i]])
    return 0


cdef tuple values(value, Fields fields):
    cdef Py_ssize_t i
    return tuple([get(value, fields.offsets[i]) for i in range(fields.count)])


# --- what every record can do ---------------------------------------------------------------------------------


def equal(self, other):
    """Compare by type and value."""
    if type(self) is not type(other):
        return False
    cdef Fields fields = fields_of(type(self))
    return values(self, fields) == values(other, fields)


def hashed(self):
    """Hash by type and value."""
    return hash((type(self), values(self, fields_of(type(self)))))


def represent(self):
    """The class and all fields."""
    cdef Fields fields = fields_of(type(self))
    parts = ", ".join([f"{name}={field!r}" for name, field in zip(fields.names, values(self, fields))])
    return f"{type(self).__name__}({parts})"


def reduced(self):
    """What pickle needs: the class and its arguments."""
    return type(self), values(self, fields_of(type(self)))


def refuse_set(self, name, value):
    """Records are frozen."""
    raise AttributeError(f"{type(self).__name__}.{name} cannot be assigned: records are frozen")


def refuse_delete(self, name):
    """Records are frozen."""
    raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted: records are frozen")


cdef dict SPECIAL = {
    "__eq__": equal,
    "__hash__": hashed,
    "__repr__": represent,
    "__reduce__": reduced,
    "__setattr__": refuse_set,
    "__delattr__": refuse_delete,
}
