/* An allocator for PyTorch that hands out addresses, while a CUDA graph is captured.
 *
 * PyTorch asks it for segments. At first it lists what it is asked for: addresses follow one another, none is given
 * away twice, and the same page of memory is behind all of them, as nothing runs yet. Once every request has a place,
 * it answers the same requests with these places, in an arena that has pages of its own. One capture at a time uses it.
 *
 * A request that was not listed is answered as well, with some address of the arena, and `unplanned` tells. What was
 * captured is not used then. Refusing would be heard: a library may choose another algorithm for good, with less memory
 * and other bits. */
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
    size_t pages, room;
} Memory;

typedef struct { uint64_t size, offset; } Place;

static struct {
    Memory *memory;
    uint64_t base, size, taken;
    int listing;
    Place *places; /* of requests, listed or to come */
    size_t count, next, room, unplanned;
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

/* Has so many pages, or fewer where the device has no more. */
static void grow(Memory *m, size_t pages) {
    if (pages > m->room) {
        uint64_t *handles = realloc(m->handles, pages * sizeof *handles);
        if (!handles) return;
        m->handles = handles;
        m->room = pages;
    }
    Properties wanted = {PINNED, 0, {ON_DEVICE, m->device}, NULL, {0}};
    while (m->pages < pages && !create(&m->handles[m->pages], PAGE, &wanted, 0)) m->pages++;
}

/* Memory behind these addresses, or behind none: the pages with these numbers, or the first one everywhere. */
static int put_behind(Memory *m, uint64_t address, size_t count, const uint32_t *pages) {
    size_t at = 0;
    while (at < count && !map(address + at * PAGE, PAGE, 0, m->handles[pages ? pages[at] : 0], 0)) at++;
    Access access = {{ON_DEVICE, m->device}, READ_AND_WRITE};
    if (at == count && (!at || !set_access(address, at * PAGE, &access, 1))) return 1;
    if (at) unmap(address, at * PAGE);
    return 0;
}

static int listed(uint64_t size, uint64_t offset) {
    if (now.count == now.room) {
        size_t room = now.room ? 2 * now.room : 1024;
        Place *places = realloc(now.places, room * sizeof *places);
        if (!places) return 0;
        now.places = places;
        now.room = room;
    }
    now.places[now.count++] = (Place){size, offset};
    return 1;
}

VISIBLE void *lowtide_take(ssize_t size, int device, void *stream) {
    (void)device; (void)stream;
    uint64_t wanted = (uint64_t)size, pages = (wanted + PAGE - 1) / PAGE, offset = now.taken;
    if (!now.memory) return NULL;
    if (!now.listing) {
        if (now.next < now.count && now.places[now.next].size == wanted) offset = now.places[now.next++].offset;
        else {
            /* One of its own: PyTorch remembers what it was given by address. Planned places are multiples of 512. */
            offset = 256 + 512 * (uint64_t)now.unplanned++;
            if (wanted > now.size || offset >= now.size) return NULL;
        }
        return (void *)(uintptr_t)(now.base + offset);
    }
    if (offset + pages * PAGE > now.size || !put_behind(now.memory, now.base + offset, pages, NULL)) return NULL;
    now.taken += pages * PAGE;
    return listed(wanted, offset) ? (void *)(uintptr_t)(now.base + offset) : NULL;
}

VISIBLE void lowtide_give(void *at, ssize_t size, int device, void *stream) {
    (void)at; (void)size; (void)device; (void)stream;
}

static void forget(PyObject *capsule) {
    Memory *m = PyCapsule_GetPointer(capsule, "lowtide");
    if (now.memory == m) now.memory = NULL;
    /* A process that was forked has no part in them. */
    for (size_t page = 0; page < m->pages && m->process == getpid(); page++) release(m->handles[page]);
    free(m->handles); free(m);
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

static PyObject *new_pages(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    unsigned long long pages;
    if (!PyArg_ParseTuple(args, "OK", &capsule, &pages)) return NULL;
    Memory *m = PyCapsule_GetPointer(capsule, "lowtide");
    if (!m) return NULL;
    grow(m, (size_t)pages);
    return PyLong_FromSize_t(m->pages);
}

static PyObject *pages(PyObject *self, PyObject *capsule) {
    (void)self;
    Memory *m = PyCapsule_GetPointer(capsule, "lowtide");
    return m ? PyLong_FromSize_t(m->pages) : NULL;
}

static PyObject *lay(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    unsigned long long base;
    const char *numbers;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "OKy#", &capsule, &base, &numbers, &size)) return NULL;
    Memory *m = PyCapsule_GetPointer(capsule, "lowtide");
    if (!m) return NULL;
    size_t count = (size_t)size / sizeof(uint32_t);
    const uint32_t *wanted = (const uint32_t *)(const void *)numbers;
    for (size_t at = 0; at < count; at++)
        if (wanted[at] >= m->pages) {
            PyErr_SetString(PyExc_ValueError, "there is no such page");
            return NULL;
        }
    if (!put_behind(m, base, count, wanted)) {
        PyErr_SetString(PyExc_OSError, "CUDA's driver cannot map memory");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *list_requests(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    unsigned long long base, size, taken;
    if (!PyArg_ParseTuple(args, "OKKK", &capsule, &base, &size, &taken)) return NULL;
    Memory *m = PyCapsule_GetPointer(capsule, "lowtide");
    if (!m) return NULL;
    if (!m->pages) {
        PyErr_SetString(PyExc_ValueError, "there is no page to put behind addresses");
        return NULL;
    }
    now.memory = m;
    now.base = base; now.size = size; now.taken = taken; now.listing = 1;
    now.count = now.next = now.unplanned = 0;
    Py_RETURN_NONE;
}

static PyObject *requests(PyObject *self, PyObject *none) {
    (void)self; (void)none;
    size_t count = now.listing ? now.count : 0;
    PyObject *found = PyBytes_FromStringAndSize((char *)now.places, (Py_ssize_t)(count * sizeof *now.places));
    if (found && now.listing) now.count = 0;
    return found;
}

static PyObject *answer(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    unsigned long long base, size;
    const char *places;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "OKKy#", &capsule, &base, &size, &places, &bytes)) return NULL;
    Memory *m = PyCapsule_GetPointer(capsule, "lowtide");
    if (!m) return NULL;
    now.memory = m;
    now.base = base; now.size = size; now.listing = 0;
    now.count = now.next = now.unplanned = 0;
    for (Py_ssize_t at = 0; at < bytes / (Py_ssize_t)sizeof(Place); at++) {
        Place one;
        memcpy(&one, places + at * (Py_ssize_t)sizeof one, sizeof one);
        if (!listed(one.size, one.offset)) return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

static PyObject *state(PyObject *self, PyObject *none) {
    (void)self; (void)none;
    return Py_BuildValue("KKK", (unsigned long long)now.taken, (unsigned long long)now.next,
                         (unsigned long long)now.unplanned);
}

static PyMethodDef methods[] = {
    {"new_memory", new_memory, METH_VARARGS, "new_memory(device) -> memory without a page"},
    {"new_pages", new_pages, METH_VARARGS, "new_pages(memory, count) -> how many it has now: so many, or fewer"},
    {"pages", pages, METH_O, "pages(memory) -> how many it has"},
    {"lay", lay, METH_VARARGS, "lay(memory, base, numbers): put these pages behind addresses, one after the other"},
    {"list_requests", list_requests, METH_VARARGS,
     "list_requests(memory, base, size, taken): hand out addresses behind those taken, and list what is asked for"},
    {"requests", requests, METH_NOARGS, "requests() -> sizes and offsets of what was listed since the last call"},
    {"answer", answer, METH_VARARGS, "answer(memory, base, size, places): answer requests of these sizes with offsets"},
    {"state", state, METH_NOARGS, "state() -> bytes of addresses taken, requests answered, requests not listed"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_segments", NULL, -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__segments(void) { return PyModule_Create(&definition); }
