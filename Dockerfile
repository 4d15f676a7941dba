# docker build -t pagedgpt .        for torch's CPU build, add --build-arg PIP_OPTIONS="--extra-index-url URL", as with make
# docker run --read-only -p 127.0.0.1:8000:8000 -e PAGEDGPT_API_KEY=KEY -v "$PWD/out/stdlib:/model:ro" pagedgpt
FROM python:3.13-slim
# on its first start, the server compiles ops/cpu.c for its CPU and keeps the result in /cache
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY constraints.txt requirements.txt ./
ARG PIP_OPTIONS
RUN pip install --no-cache-dir $PIP_OPTIONS -c constraints.txt -r requirements.txt && install -d -o 65534 /cache
COPY . .
USER 65534
ENV XDG_CACHE_HOME=/cache TMPDIR=/cache
VOLUME /cache
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["python", "serve.py", "--model", "/model", "--host", "0.0.0.0"]
