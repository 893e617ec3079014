/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The module, and the parts shared by all: exceptions, forks, the clock.
 *
 * Exceptions are created by Python (kvd/errors.py has the classes), which passes a
 * function at import. A child of fork() is detected by a counter that an atfork
 * handler increments, because querying the pid costs a system call and a lock may
 * be held forever there: the counter is checked before any lock is taken.
 */
#include "python/src/ext.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static PyObject *error_maker; /* (code, message, scope, retryable) -> exception */
static _Atomic unsigned int forks;

static void on_child(void)
{
	forks++;
}

unsigned int ext_forks(void)
{
	return forks;
}

static PyObject *error_tuple(const struct kvd_error *error)
{
	PyObject *message = PyUnicode_DecodeUTF8(
		error->message, (Py_ssize_t)strlen(error->message), "replace");

	return message ? Py_BuildValue("(isisN)", error->code, kvd_code_name(error->code),
				       (int)error->retryable, error->scope, message)
		       : NULL;
}

PyObject *ext_error(const struct kvd_error *error)
{
	if (!error || !error->code)
		Py_RETURN_NONE;
	return error_tuple(error);
}

PyObject *ext_raise(const struct kvd_error *error)
{
	PyObject *args = error_tuple(error), *exception = NULL;

	if (args && error_maker)
		exception = PyObject_CallObject(error_maker, args);
	if (exception)
		PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
	else if (!PyErr_Occurred())
		PyErr_SetString(PyExc_RuntimeError, error->message);
	Py_XDECREF(exception);
	Py_XDECREF(args);
	return NULL;
}

PyObject *ext_raise_code(int code, const char *fmt, ...)
{
	struct kvd_error error = {.code = code, .scope = "op"};
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(error.message, sizeof(error.message), fmt, ap);
	va_end(ap);
	return ext_raise(&error);
}

int ext_timeout(PyObject *seconds, void *ms_p)
{
	int *ms = ms_p;
	double s;

	*ms = 0;
	if (seconds == Py_None)
		return 1;
	s = PyBool_Check(seconds) ? 0 : PyFloat_AsDouble(seconds);
	if (PyErr_Occurred())
		return 0;
	if (isnan(s) || s <= 0) {
		PyErr_SetString(PyExc_ValueError,
				"timeout: a positive number of seconds");
		return 0;
	}
	*ms = s > 2e6 ? 2000000000 : s < 0.001 ? 1 : (int)(s * 1000);
	return 1;
}

PyTypeObject *ext_type(PyObject *module, const char *name, size_t bytes,
		       PyType_Slot *slots)
{
	PyType_Spec spec = {.name = name,
			    .basicsize = (int)bytes,
			    .flags = Py_TPFLAGS_DEFAULT,
			    .slots = slots};
	PyObject *type = PyType_FromSpec(&spec);

	if (!type)
		return NULL;
	Py_INCREF(type); /* one reference for the module, one for C */
	if (PyModule_AddObject(module, strrchr(name, '.') + 1, type) < 0) {
		Py_DECREF(type);
		Py_DECREF(type);
		return NULL;
	}
	return (PyTypeObject *)(void *)type;
}

void *ext_new(PyTypeObject *type, struct client *client)
{
	allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
	struct owned *object = (struct owned *)alloc(type, 0);

	if (!object)
		return NULL;
	Py_INCREF(client);
	object->client = client;
	return object;
}

void ext_free(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

	Py_XDECREF(((struct owned *)self)->client);
	release(self);
	Py_DECREF(type);
}

static PyObject *set_error_maker(PyObject *Py_UNUSED(module), PyObject *maker)
{
	PyObject *old = error_maker;

	Py_INCREF(maker);
	error_maker = maker;
	Py_XDECREF(old);
	Py_RETURN_NONE;
}

static PyObject *version(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
	return PyUnicode_FromString(kvd_version());
}

static PyObject *code_name(PyObject *Py_UNUSED(module), PyObject *args)
{
	int code;

	if (!PyArg_ParseTuple(args, "i", &code))
		return NULL;
	return PyUnicode_FromString(kvd_code_name(code));
}

static PyMethodDef functions[] = {
	{"set_error_maker", set_error_maker, METH_O, NULL},
	{"version", version, METH_NOARGS, NULL},
	{"code_name", code_name, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_def = {
	PyModuleDef_HEAD_INIT,
	.m_name = "kvd._kvd",
	.m_size = -1,
	.m_methods = functions,
};

PyMODINIT_FUNC PyInit__kvd(void)
{
	PyObject *module = PyModule_Create(&module_def);

	if (!module)
		return NULL;
	if (ext_client_init(module) < 0 || ext_memory_init(module) < 0 ||
	    ext_room_init(module) < 0 || ext_lists_init(module) < 0 ||
	    ext_xfer_init(module) < 0 || ext_cost_init(module) < 0 ||
	    ext_chunk_init(module) < 0 || ext_attend_init(module) < 0 ||
	    ext_math_init(module) < 0) {
		Py_DECREF(module);
		return NULL;
	}
	pthread_atfork(NULL, NULL, on_child);
	return module;
}
