/* An allocator for PyTorch that hands out addresses one after the other, with pages of memory behind them.
 *
 * PyTorch asks it for segments while a CUDA graph is captured. No address is given away twice, and none is taken
 * back. Pages are: `give` says that what lies on them is dead, and they are put behind later addresses too. One
 * capture at a time uses it; `hand_out` says which addresses and which pages there are.
 *
 * Where there are too few pages, a page that is in use is put behind the address as well, and `lacking` tells.
 * Nothing runs while a graph is captured, and this one will not be used. Refusing would be heard: a library may
 * choose another algorithm for good, with less memory and other bits. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#define PAGE ((uint64_t)2 << 20)
#define VISIBLE __attribute__((visibility("default")))

/* As CUDA's driver has them. */
typedef struct { int type, id; } Location;
typedef struct { int type, handle_types; Location location; void *metadata; unsigned char flags[8]; } Properties;
typedef struct { Location location; int flags; } Access;
enum { PINNED = 1, ON_DEVICE = 1, READ_AND_WRITE = 3 };

typedef struct {
    int device;
    pid_t process;
    uint64_t *handles;
    uint32_t *free, *log;
    size_t pages, room, unused, logged, log_room;
} Memory;

static struct {
    Memory *memory;
    uint64_t base, size, taken, most, lacking;
} now;

static int (*create)(uint64_t *, size_t, const Properties *, unsigned long long);
static int (*release)(uint64_t);
static int (*map)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
static int (*unmap)(uint64_t, size_t);
static int (*set_access)(uint64_t, size_t, const Access *, size_t);

static int load_driver(void) {
    if (set_access) return 1;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!driver) return 0;
    *(void **)&create = dlsym(driver, "cuMemCreate");
    *(void **)&release = dlsym(driver, "cuMemRelease");
    *(void **)&map = dlsym(driver, "cuMemMap");
    *(void **)&unmap = dlsym(driver, "cuMemUnmap");
    *(void **)&set_access = dlsym(driver, "cuMemSetAccess");
    return create && release && map && unmap && set_access;
}

/* One more page: its number, or -1. */
static int64_t new_page(Memory *m) {
    if (m->pages >= now.most) return -1;
    if (m->pages == m->room) {
        size_t room = m->room ? 2 * m->room : 1024;
        uint64_t *handles = realloc(m->handles, room * sizeof *handles);
        if (handles) m->handles = handles;
        uint32_t *pages = handles ? realloc(m->free, room * sizeof *pages) : NULL;
        if (!pages) return -1;
        m->free = pages;
        m->room = room;
    }
    Properties wanted = {PINNED, 0, {ON_DEVICE, m->device}, NULL, {0}};
    if (create(&m->handles[m->pages], PAGE, &wanted, 0)) return -1;
    return (int64_t)m->pages++;
}

/* A page that nobody uses, or a new one, or any: its number; -1 where there is none at all. */
static int64_t next_page(Memory *m) {
    if (m->unused) return m->free[--m->unused];
    int64_t page = new_page(m);
    if (page >= 0 || !m->pages) return page;
    now.lacking++;
    return 0;
}

/* Nobody uses a page; once some were lacking, it may have been put behind several addresses. */
static void unused(Memory *m, uint32_t page) {
    if (!now.lacking) m->free[m->unused++] = page;
}

static int noted(Memory *m, uint32_t page) {
    if (m->logged == m->log_room) {
        size_t room = m->log_room ? 2 * m->log_room : 1024;
        uint32_t *log = realloc(m->log, room * sizeof *log);
        if (!log) return 0;
        m->log = log;
        m->log_room = room;
    }
    m->log[m->logged++] = page;
    return 1;
}

/* Pages behind all of these addresses, or behind none: PyTorch may ask for less then. */
static int put_behind(Memory *m, uint64_t address, uint64_t bytes) {
    size_t before = m->logged;
    uint64_t at = 0;
    for (; at < bytes; at += PAGE) {
        int64_t page = next_page(m);
        if (page < 0) break;
        if (!noted(m, (uint32_t)page)) {
            unused(m, (uint32_t)page);
            break;
        }
        if (map(address + at, PAGE, 0, m->handles[page], 0)) {
            unused(m, m->log[--m->logged]);
            break;
        }
    }
    Access access = {{ON_DEVICE, m->device}, READ_AND_WRITE};
    if (at == bytes && !set_access(address, bytes, &access, 1)) return 1;
    if (at) unmap(address, at);
    while (m->logged > before) unused(m, m->log[--m->logged]);
    return 0;
}

VISIBLE void *lowtide_take(ssize_t size, int device, void *stream) {
    (void)device; (void)stream;
    uint64_t bytes = ((uint64_t)size + PAGE - 1) / PAGE * PAGE, at = now.base + now.taken;
    if (!now.memory || now.taken + bytes > now.size || !put_behind(now.memory, at, bytes)) return NULL;
    now.taken += bytes;
    return (void *)(uintptr_t)at;
}

VISIBLE void lowtide_give(void *at, ssize_t size, int device, void *stream) {
    (void)at; (void)size; (void)device; (void)stream;
}

static void forget(PyObject *capsule) {
    Memory *m = PyCapsule_GetPointer(capsule, "lowtide");
    if (now.memory == m) now.memory = NULL;
    /* A process that was forked has no part in them. */
    for (size_t page = 0; page < m->pages && m->process == getpid(); page++) release(m->handles[page]);
    free(m->handles); free(m->free); free(m->log); free(m);
}

static PyObject *new_memory(PyObject *self, PyObject *args) {
    (void)self;
    int device;
    if (!PyArg_ParseTuple(args, "i", &device)) return NULL;
    if (!load_driver()) {
        PyErr_SetString(PyExc_OSError, "CUDA's driver cannot map memory");
        return NULL;
    }
    Memory *m = calloc(1, sizeof *m);
    if (!m) return PyErr_NoMemory();
    m->device = device;
    m->process = getpid();
    return PyCapsule_New(m, "lowtide", forget);
}

static PyObject *hand_out(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    unsigned long long base, size, taken, most;
    if (!PyArg_ParseTuple(args, "OKKKK", &capsule, &base, &size, &taken, &most)) return NULL;
    Memory *m = PyCapsule_GetPointer(capsule, "lowtide");
    if (!m) return NULL;
    now.memory = m;
    now.base = base; now.size = size; now.taken = taken; now.most = most; now.lacking = 0;
    m->logged = 0;
    Py_RETURN_NONE;
}

static PyObject *taken_bytes(PyObject *self, PyObject *none) {
    (void)self; (void)none;
    return PyLong_FromUnsignedLongLong(now.taken);
}

static PyObject *lacking(PyObject *self, PyObject *none) {
    (void)self; (void)none;
    return PyLong_FromUnsignedLongLong(now.lacking);
}

static PyObject *pages(PyObject *self, PyObject *capsule) {
    (void)self;
    Memory *m = PyCapsule_GetPointer(capsule, "lowtide");
    return m ? PyLong_FromSize_t(m->pages) : NULL;
}

static PyObject *logged(PyObject *self, PyObject *capsule) {
    (void)self;
    Memory *m = PyCapsule_GetPointer(capsule, "lowtide");
    if (!m) return NULL;
    PyObject *found = PyBytes_FromStringAndSize((char *)m->log, (Py_ssize_t)(m->logged * sizeof *m->log));
    m->logged = 0;
    return found;
}

static PyObject *give(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    const char *numbers;
    Py_ssize_t size;
    int all;
    if (!PyArg_ParseTuple(args, "Oy#p", &capsule, &numbers, &size, &all)) return NULL;
    Memory *m = PyCapsule_GetPointer(capsule, "lowtide");
    if (!m) return NULL;
    size_t count = (size_t)size / sizeof *m->free;
    if (all) m->unused = 0;
    if (m->unused + count > m->pages) {
        PyErr_SetString(PyExc_ValueError, "more pages are given back than there are");
        return NULL;
    }
    memcpy(m->free + m->unused, numbers, count * sizeof *m->free);
    m->unused += count;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"new_memory", new_memory, METH_VARARGS, "new_memory(device) -> memory without a page"},
    {"hand_out", hand_out, METH_VARARGS,
     "hand_out(memory, base, size, taken, most): addresses behind those taken, and pages, so many at most"},
    {"taken", taken_bytes, METH_NOARGS, "taken() -> bytes from the base on that were handed out"},
    {"lacking", lacking, METH_NOARGS, "lacking() -> pages that were missing since addresses are handed out"},
    {"pages", pages, METH_O, "pages(memory) -> how many it has"},
    {"logged", logged, METH_O, "logged(memory) -> numbers of the pages behind what was taken since the last call"},
    {"give", give, METH_VARARGS, "give(memory, pages, all): nobody uses these; or these are all that nobody uses"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_segments", NULL, -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__segments(void) { return PyModule_Create(&definition); }
