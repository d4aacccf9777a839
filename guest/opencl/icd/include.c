/* Files that programs include. The application may read them, the executor may not: it is confined, has another
 * user, another working folder, and perhaps another host. So their text goes with the build. */
#include "gx.h"
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The paths have to fit into one request. */
enum { MOST_FILES = 512, MOST_BYTES = 16 << 20, MOST_PATH = 4096, MOST_PATHS = GX_MAX_REQUEST / 2 };

struct file { char *path, *text; size_t len; };

struct search {
	char *dirs[256]; /* of -I, absolute */
	uint32_t ndirs, nfiles;
	size_t bytes, paths;
	char cwd[MOST_PATH];
	struct file files[MOST_FILES];
};

/* absolute makes dir/name without dots and without doubled slashes. It does not ask the file system. */
static char *absolute(const char *dir, const char *name, size_t n)
{
	size_t d = n && name[0] == '/' ? 0 : strlen(dir), at = 0;
	char *in = malloc(d + n + 3), *out = malloc(d + n + 3);
	if (!in || !out || d + n + 3 > MOST_PATH) {
		free(in);
		free(out);
		return NULL;
	}
	memcpy(in, dir, d);
	in[d] = '/';
	memcpy(in + d + 1, name, n);
	in[d + 1 + n] = 0;
	for (char *save, *part = strtok_r(in, "/", &save); part; part = strtok_r(NULL, "/", &save)) {
		if (!strcmp(part, "."))
			continue;
		if (!strcmp(part, "..")) {
			while (at && out[--at] != '/')
				;
			continue;
		}
		out[at++] = '/';
		size_t len = strlen(part);
		memcpy(out + at, part, len);
		at += len;
	}
	if (!at)
		out[at++] = '/';
	out[at] = 0;
	free(in);
	return out;
}

static bool blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\v' || c == '\f'; }

/* word takes the next word of the options, without its quotes. */
static bool word(const char **at, char *out)
{
	const char *p = *at;
	size_t n = 0;
	while (blank(*p))
		p++;
	if (!*p)
		return false;
	for (bool quoted = false; *p && (quoted || !blank(*p)); p++)
		if (*p == '"')
			quoted = !quoted;
		else if (n < MOST_PATH - 1)
			out[n++] = *p;
	out[n] = 0;
	*at = p;
	return true;
}

static void find_dirs(struct search *s, const char *options)
{
	char w[MOST_PATH + 2];
	while (options && word(&options, w)) {
		if (strncmp(w, "-I", 2))
			continue;
		if (!w[2] && !word(&options, w + 2))
			return;
		if (s->ndirs < COUNT(s->dirs) && (s->dirs[s->ndirs] = absolute(s->cwd, w + 2, strlen(w + 2))))
			s->ndirs++;
	}
}

/* have reports whether there is such a file, and reads it if it is new. */
static bool have(struct search *s, const char *dir, const char *name, size_t n)
{
	char *path = absolute(dir, name, n);
	if (!path)
		return false;
	for (uint32_t i = 0; i < s->nfiles; i++)
		if (!strcmp(s->files[i].path, path)) {
			free(path);
			return true;
		}
	struct stat st;
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	char *text = NULL;
	size_t len = 0;
	if (fd >= 0 && !fstat(fd, &st) && S_ISREG(st.st_mode) && s->nfiles < MOST_FILES && s->paths + strlen(path) + 2 < MOST_PATHS &&
		(uint64_t)st.st_size < MOST_BYTES - s->bytes && (text = malloc((size_t)st.st_size + 1))) {
		for (ssize_t got = 1; got > 0 && len < (size_t)st.st_size; len += got > 0 ? (size_t)got : 0)
			got = read(fd, text + len, (size_t)st.st_size - len);
		text[len++] = '\n'; /* no program is empty */
		s->files[s->nfiles++] = (struct file){path, text, len};
		s->bytes += len;
		s->paths += strlen(path) + 2;
	}
	if (fd >= 0)
		close(fd);
	if (!text)
		free(path);
	return text;
}

/* scan looks for what a text includes. What is in a comment, or left out by #if, does no harm. dir is that of the
 * text's own file. */
static void scan(struct search *s, const char *text, size_t len, const char *dir)
{
	const char *end = text + len;
	for (const char *p = text; p < end; p++) {
		while (p < end && blank(*p))
			p++;
		if (p < end && *p == '#') {
			for (p++; p < end && (*p == ' ' || *p == '\t'); p++)
				;
			if ((size_t)(end - p) > 7 && !memcmp(p, "include", 7)) {
				for (p += 7; p < end && (*p == ' ' || *p == '\t'); p++)
					;
				char close = p < end && *p == '"' ? '"' : p < end && *p == '<' ? '>' : 0;
				const char *name = p + 1, *stop = close ? name : end;
				while (stop < end && *stop != close && *stop != '\n')
					stop++;
				size_t n = (size_t)(stop - name);
				if (stop < end && *stop == close && n && n < MOST_PATH && *name != '/' && !(close == '"' && have(s, dir, name, n)))
					for (uint32_t i = 0; i < s->ndirs && !have(s, s->dirs[i], name, n); i++)
						;
			}
		}
		while (p < end && *p != '\n')
			p++;
	}
}

/* send makes a program of each file. */
static cl_int send_files(cl_program p, const struct search *s, struct gx_files *f)
{
	size_t bytes = s->paths + strlen(s->cwd) + 1;
	f->programs = calloc(s->nfiles, sizeof *f->programs);
	f->ids = calloc(s->nfiles, sizeof *f->ids);
	char *at = f->names = malloc(bytes);
	if (!f->programs || !f->ids || !f->names)
		return CL_OUT_OF_HOST_MEMORY;
	for (uint32_t i = 0; i < s->nfiles; i++) {
		cl_int err;
		f->programs[i] = clCreateProgramWithSource(p->ctx, 1, (const char **)&s->files[i].text, &s->files[i].len, &err);
		if (err)
			return err;
		f->n = i + 1;
		f->ids[i] = f->programs[i]->o.id;
		*at++ = '/'; /* two slashes: no header of clCompileProgram */
		at = stpcpy(at, s->files[i].path) + 1;
	}
	strcpy(at, s->cwd);
	f->nnames = (uint32_t)bytes;
	return CL_SUCCESS;
}

cl_int gx_files_find(cl_program p, const char *options, struct gx_files *f)
{
	*f = (struct gx_files){0};
	if (!p->source || !memmem(p->source, p->nsource, "include", 7))
		return CL_SUCCESS;
	struct search *s = calloc(1, sizeof *s);
	if (!s)
		return CL_OUT_OF_HOST_MEMORY;
	if (!getcwd(s->cwd, sizeof s->cwd) || *s->cwd != '/')
		strcpy(s->cwd, "/");
	find_dirs(s, options);
	scan(s, p->source, p->nsource - 1, s->cwd);
	for (uint32_t i = 0; i < s->nfiles; i++) { /* it grows */
		char *slash = strrchr(s->files[i].path, '/');
		char *dir = absolute("", s->files[i].path, (size_t)(slash - s->files[i].path));
		if (dir)
			scan(s, s->files[i].text, s->files[i].len, dir);
		free(dir);
	}
	cl_int err = s->nfiles ? send_files(p, s, f) : CL_SUCCESS;
	if (err)
		gx_files_drop(f);
	for (uint32_t i = 0; i < s->nfiles; i++) {
		free(s->files[i].path);
		free(s->files[i].text);
	}
	for (uint32_t i = 0; i < s->ndirs; i++)
		free(s->dirs[i]);
	free(s);
	return err;
}

void gx_files_drop(struct gx_files *f)
{
	for (uint32_t i = 0; i < f->n; i++)
		clReleaseProgram(f->programs[i]);
	free(f->programs);
	free(f->ids);
	free(f->names);
	*f = (struct gx_files){0};
}
